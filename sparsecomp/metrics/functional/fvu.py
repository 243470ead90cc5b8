"""Fraction of variance unexplained."""

import torch
from torch import Tensor

from sparsecomp.metrics.functional.undefined import UndefinedError


def fvu(outputs: Tensor, targets: Tensor) -> float:
    """Fraction of variance unexplained, sum (y - o)^2 / sum (y - mean y)^2 over samples and outputs, >= 0.

    0 is a perfect network and 1 as good as the mean of each output; 1 - FVU is R^2 weighted by variance. Read it beside
    every other metric, as none of them notices a wrong function.

    Args:
        outputs: (n, ...) of the network.
        targets: (n, ...) of the same shape, or (n,) for outputs (n, 1).

    Raises:
        UndefinedError: If the targets are class labels or of another shape, or do not vary.

    >>> fvu(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    0.5
    """
    return fvu_of_sums(fvu_sums(outputs, targets))


def fvu_sums(outputs: Tensor, targets: Tensor) -> Tensor:
    """(4, outputs) float64: per output the number of samples, sum (y - o)^2, sum y and sum y^2; they add over batches."""
    if not targets.is_floating_point() or targets.numel() != outputs.numel() or len(targets) != len(outputs):
        raise UndefinedError(
            f"targets must be real numbers of the shape of the outputs, {tuple(outputs.shape)}; they are "
            f"{targets.dtype} of shape {tuple(targets.shape)}."
        )
    y = targets.reshape(len(targets), -1).double()
    errors = y - outputs.reshape(len(y), -1).double()
    return torch.stack([torch.full_like(y[0], len(y)), errors.square().sum(0), y.sum(0), y.square().sum(0)])


def fvu_of_sums(sums: Tensor) -> float:
    """FVU from the result of `fvu_sums`, added over batches."""
    count, error, total, square = sums
    variation = float((square - total.square() / count).sum())
    if variation <= 1e-12 * float(square.sum()):
        raise UndefinedError("the targets do not vary.")
    return float(error.sum()) / variation
