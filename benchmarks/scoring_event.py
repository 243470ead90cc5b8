"""What an event of similarity-based pruning takes, and how much faster forward selection scores than exact elimination."""

import time

import torch
from torch import Tensor, nn

from benchmarks.timing import medians
from sparsecomp import MaskStore, Probe, ScoreContext, Similarity
from sparsecomp.allocation import resolve_allocation
from sparsecomp.data import DigitsDataModule
from sparsecomp.functional.similarity import elimination_cost, forward_selection_cost
from sparsecomp.models import MLP, RowTransformer, SmallConvNet
from sparsecomp.planning import make_plan

PARTS = ("statistics", "scores", "allocation", "refit")


def _digits() -> tuple[Tensor, Tensor]:
    data = DigitsDataModule(validation=0, seed=0)
    data.setup("fit")
    x, y = data.train_dataloader().tensors
    return x, y


def events(rounds: int) -> list[tuple[str, float, dict[str, float]]]:
    """(network, seconds of a training epoch, seconds of each part of an event that prunes a dense network to 50%)."""
    torch.manual_seed(0)
    x, y = _digits()
    wide = torch.randn(4096, 1600), torch.randint(10, (4096,))
    work: dict[str, tuple[nn.Module, Tensor, Tensor, int, int]] = {
        "digits, MLP 64-128-128-10": (MLP(64, 10), x, y, 64, rounds),
        "digits, conv net 1-16-32": (SmallConvNet(1, 10, image_size=8), x, y, 64, rounds),
        "digits, transformer of width 32": (RowTransformer(8, 8, 10), x, y, 64, rounds),
        "MLP 1600-200-10, 4,096 samples": (MLP(1600, 10, hidden=(200,)), *wide, 128, 1),
    }
    results = []
    for name, (network, inputs, targets, size, times) in work.items():
        batches = list(zip(inputs.split(size), targets.split(size), strict=True))
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        epochs, parts = [], []
        for _ in range(times):
            start = time.perf_counter()
            for batch, labels in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(network(batch), labels).backward()
                optimizer.step()
            epochs.append(time.perf_counter() - start)
            store = MaskStore(network)
            probe = Probe()
            context = ScoreContext(network, store.weights, store.masks, 0, batches, None, store.selected, probe)
            make_plan(Similarity(), resolve_allocation("global"), 0.5, context, store)
            parts.append(context.stopwatch.seconds)
        seconds = {part: sorted(of[part] for of in parts)[times // 2] for part in PARTS}
        results.append((name, sorted(epochs)[times // 2], seconds))
    return results


def rows(rounds: int) -> list[tuple[str, float, float]]:
    """(what, exact elimination's time over forward selection's, the least it should be)."""
    results = []
    for d, times in (
        (256, rounds),
        (512, 1),
    ):  # of the wider layer a part of the units: exact elimination takes its time
        units = 256
        generator = torch.Generator().manual_seed(d)
        a = torch.randn(4 * d, d, generator=generator).double()
        covariance = torch.cov(
            (a @ (torch.eye(d).double() + torch.randn(d, d, generator=generator) / d)).T, correction=0
        )
        weight = torch.randn(units, d, generator=generator).double()
        variance = ((weight @ covariance) * weight).sum(1)
        contestants = {
            "exact": lambda w=weight, c=covariance, v=variance: elimination_cost(w, c, v),
            "forward": lambda w=weight, c=covariance, v=variance: forward_selection_cost(w, c, v),
        }
        seconds = medians(contestants, times, warmup=1)
        results.append((f"scores of {units} units of {d} inputs", seconds["exact"] / seconds["forward"], 8.0))
    return results
