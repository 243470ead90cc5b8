"""A masked training step against a dense one, and against the hooks of torch.nn.utils.prune."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from benchmarks.timing import medians
from sparsecomp import Magnitude, prune
from sparsecomp.models import MLP, SmallConvNet

SPARSITY = 0.9


def _step(network: nn.Module, x: Tensor, y: Tensor, between: Callable[[], None] = lambda: None) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        between()
        optimizer.step()

    return step


def _contestants(network: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], None]]:
    dense, masked, hooked = (copy.deepcopy(network) for _ in range(3))
    store = prune(masked, Magnitude(), SPARSITY)
    layers = [(layer, "weight") for layer in hooked.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    torch_prune.global_unstructured(layers, torch_prune.L1Unstructured, amount=SPARSITY)
    return {
        "dense": _step(dense, x, y),
        "masked": _step(masked, x, y, store.mask_grads_),
        "hooks": _step(hooked, x, y),
    }


def rows(rounds: int) -> list[tuple[str, float, float, float]]:
    """(what, ratio to dense, the limit, ratio to dense of hooks)."""
    torch.manual_seed(0)
    mlp = MLP(256, 10, hidden=(1024, 1024, 1024))
    conv = SmallConvNet(3, 10, image_size=32, channels=(32, 64))
    work = {
        "MLP 256-1024-1024-1024-10, batch 64": (mlp, torch.randn(64, 256), 1.10, rounds),
        "MLP 256-1024-1024-1024-10, batch 512": (mlp, torch.randn(512, 256), 1.03, rounds // 2),
        "conv net 3-32-64 on 32 x 32, batch 32": (conv, torch.randn(32, 3, 32, 32), 1.03, rounds // 2),
    }
    results = []
    for name, (network, x, limit, repeats) in work.items():
        seconds = medians(_contestants(network, x, torch.randint(10, (len(x),))), repeats)
        dense = seconds["dense"]
        results.append((f"masked step, {name}", seconds["masked"] / dense, limit, seconds["hooks"] / dense))
    return results
