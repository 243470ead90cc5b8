"""The least-squares refit after allocation, and the base of criteria that have it by choice."""

import copy
from abc import ABC
from collections.abc import Mapping

import torch
from torch import Tensor

from sparsecomp._checks import check_instance
from sparsecomp.criteria.base import Criterion, Need, ScoreContext
from sparsecomp.following_norms import following_norms
from sparsecomp.functional.refitting import refit


class OptionalRefit(Criterion, ABC):
    """A criterion that refits kept weights where asked to.

    Args:
        refit: Whether kept weights are refitted by least squares after allocation, as those of `Similarity` are.

    Raises:
        TypeError: If `refit` is no bool.
    """

    def __init__(self, refit: bool = False) -> None:
        self.refits = check_instance("refit", refit, "whether kept weights are refitted", bool, "True")

    @property
    def needs(self) -> frozenset[Need]:
        """Input moments where it refits."""
        return frozenset({Need.INPUT_MOMENTS} if self.refits else ())

    def refit(self, context: ScoreContext, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Kept weights by least squares where asked for; see `least_squares`."""
        return least_squares(context, masks, {}, {}) if self.refits else {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(refit={self.refits})"


def least_squares(
    context: ScoreContext, masks: Mapping[str, Tensor], weights: Mapping[str, Tensor], biases: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Kept weights such that each pre-activation stays what it was.

    Offsets go into the bias, without one into a BatchNorm's running mean; where there is neither, the fit goes through
    the origin.

    Args:
        context: The network and its data.
        masks: Name to the new mask.
        weights: Name to weights that stand in for those of the network (after merging), where they do.
        biases: The same of biases, by the name of the weight.

    Returns:
        New values by the name of the parameter or buffer.
    """
    statistics = context.statistics()
    norms = following_norms(context.module, context.selected, _first(context), context.probe)
    fitted: dict[str, Tensor] = {}
    for entry in context.selected:
        layer = statistics[entry.name]
        weight = weights.get(entry.name, context.weights[entry.name])
        own = entry.owner._parameters[entry.bias] if entry.bias else None
        bias = biases.get(entry.name, own)
        free = bias is not None or entry.name in norms
        mean = layer.mean if free else torch.zeros_like(layer.mean)
        covariance = layer.covariance if free else layer.second_moment
        # Of fewer rows than inputs every unit looks determined by few of them.
        exact_below = 1e-6 if layer.count > mean.shape[-1] else 0.0
        fitted[entry.name], offset = _refit_by_group(weight, bias, masks[entry.name], mean, covariance, exact_below)
        if bias is not None and entry.bias_name is not None:
            fitted[entry.bias_name] = offset
        elif entry.name in norms:
            name, norm = norms[entry.name]
            if norm.running_mean is not None:
                fitted[f"{name}.running_mean"] = norm.running_mean - offset
    return fitted


def _first(context: ScoreContext) -> object:
    with torch.random.fork_rng(devices=[]):
        return next(iter(copy.copy(context.data if context.data is not None else ())))


def _refit_by_group(
    weight: Tensor, bias: Tensor | None, mask: Tensor, mean: Tensor, covariance: Tensor, exact_below: float
) -> tuple[Tensor, Tensor]:
    if covariance.dim() == 2:
        return refit(weight, bias, mask, mean, covariance, exact_below=exact_below)
    groups = len(covariance)
    biases = bias.chunk(groups) if bias is not None else [None] * groups
    parts = zip(weight.chunk(groups), biases, mask.chunk(groups), mean, covariance, strict=True)
    weights, offsets = zip(*(refit(*part, exact_below=exact_below) for part in parts), strict=True)
    return torch.cat(weights), torch.cat(offsets)
