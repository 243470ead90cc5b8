"""Selecting the weights to drop among 25 million scores, against torch.nn.utils.prune.global_unstructured."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from benchmarks.timing import medians
from sparsecomp import Global

SHAPES = [(5000, 1000)] * 5
SPARSITY = 0.8


def _weights() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def _ours() -> Callable[[], object]:
    scores = {str(index): weight.abs() for index, weight in enumerate(_weights())}
    allocation = Global()
    return lambda: allocation(scores, SPARSITY)


def _torch() -> Callable[[], object]:
    layers = []
    for weight in _weights():
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight
        layers.append(layer)
    pairs = [(layer, "weight") for layer in layers]
    scores = {(layer, "weight"): layer.weight.detach().abs() for layer in layers}

    def select() -> None:
        # Alone the choice of the weights: the method's own mask over the joined scores, as global_unstructured does.
        torch_prune.global_unstructured(
            pairs, torch_prune.L1Unstructured, importance_scores=scores, amount=round(SPARSITY * 25_000_000)
        )
        for layer, name in pairs:
            torch_prune.remove(layer, name)

    return select


CONTESTANTS = {"ours": _ours, "torch": _torch}


def peak_mebibytes(name: str) -> float:
    """Memory that one call takes on top of its inputs, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.selection", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def rows(rounds: int) -> list[tuple[str, float, float, float]]:
    """(what, seconds of torch / ours, the least it should be, seconds of ours)."""
    seconds = medians({name: make() for name, make in CONTESTANTS.items()}, rounds, warmup=1)
    return [("selection of 25 million scores", seconds["torch"] / seconds["ours"], 5.0, seconds["ours"])]


def _kibibytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only.")
    return int(found.group(1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    call = CONTESTANTS[sys.argv[1]]()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _kibibytes("VmRSS")
    call()
    print((_kibibytes("VmHWM") - before) / 1024)
