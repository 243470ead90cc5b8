"""Nominal sparsity."""

from collections.abc import Mapping

from torch import Tensor

from sparsecomp.metrics.functional.undefined import UndefinedError


def sparsity(masks: Mapping[str, Tensor]) -> float:
    """Fraction of the masked weights that is removed, in [0, 1].

    Args:
        masks: Parameter name to bool tensor, True = kept.

    Raises:
        UndefinedError: If there is no weight.

    >>> import torch
    >>> sparsity({"weight": torch.tensor([[True, False], [False, False]])})
    0.75
    """
    total = sum(mask.numel() for mask in masks.values())
    if total == 0:
        raise UndefinedError("there are no masks.")
    return 1 - sum(int(mask.count_nonzero()) for mask in masks.values()) / total
