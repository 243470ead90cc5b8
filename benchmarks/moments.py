"""Second moments of the inputs of a layer, against the forward of that layer and the plain way to take them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import medians
from sparsecomp.moments import InputMoments


def _plain(layer: nn.Linear | nn.Conv2d, x: Tensor) -> Callable[[], object]:
    """Unfold and multiply, the whole square in float32."""
    width = layer.weight[0].numel()
    total = torch.zeros(width, width)

    def update() -> None:
        rows = x if isinstance(layer, nn.Linear) else F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, width)
        total.addmm_(rows.T, rows)

    return update


def rows(rounds: int) -> list[tuple[str, float, float, float]]:
    """(what, ratio to the layer's forward, the limit, ratio of the plain way)."""
    torch.manual_seed(0)
    work = {
        "Linear 1600, batch 512": (nn.Linear(1600, 1600), torch.randn(512, 1600), 0.7),
        "3 x 3 conv, 256 channels, 16 x 16": (nn.Conv2d(256, 256, 3, padding=1), torch.randn(8, 256, 16, 16), 3.0),
    }
    results = []
    for name, (layer, x, limit) in work.items():
        forward = torch.no_grad()(lambda layer=layer, x=x: layer(x))
        moments = InputMoments(layer)
        contestants = {
            "forward": forward,
            "moments": lambda moments=moments, x=x: moments.update(x),
            "plain": _plain(layer, x),
        }
        seconds = medians(contestants, rounds)
        ratios = (seconds["moments"] / seconds["forward"], seconds["plain"] / seconds["forward"])
        results.append((f"second moments, {name}", ratios[0], limit, ratios[1]))
    return results
