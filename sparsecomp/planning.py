"""One pruning event: plan everything, then commit. What fails in the plan leaves everything as it was."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparsecomp._distributed import broadcast_from_rank_zero_
from sparsecomp.allocation import Allocation
from sparsecomp.connectivity import ConnectivityGraph, allocate_effective
from sparsecomp.criteria import Criterion, ScoreContext
from sparsecomp.masks import MaskStore


@dataclass(frozen=True)
class Plan:
    """The outcome of a pruning event before anything changes.

    Attributes:
        masks: Name to new mask, with those of biases where whole units go.
        refit: Name to new value of a parameter or buffer.
    """

    masks: dict[str, Tensor]
    refit: dict[str, Tensor]

    @torch.no_grad()
    def commit(self, module: nn.Module, store: MaskStore) -> None:
        """Write refitted tensors and masks."""
        live = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, value in self.refit.items():
            live[name].copy_(value)
        store.update_(self.masks)


@torch.no_grad()
def make_plan(
    criterion: Criterion,
    allocation: Allocation,
    sparsity: float,
    context: ScoreContext,
    store: MaskStore,
    graph: ConnectivityGraph | None = None,
) -> Plan:
    """Score, allocate, refit.

    With a `graph` the sparsity is the effective one, and `allocate_effective` takes the place of the allocation.

    Raises:
        ValueError: If a need of the criterion is not met, or its scores have other names or shapes than the weights or
            are not finite, or refit values do not fit. Nothing has changed.
    """
    criterion.check_needs(context)
    with context.stopwatch("scores"):
        scores = criterion.score(context)
    _check_fit(f"{type(criterion).__name__}.score", scores, context.weights, complete=True)
    with context.stopwatch("allocation"):
        if graph is not None:
            masks = allocate_effective(graph, scores, sparsity, store.masks)
        else:
            masks = allocation(scores, sparsity, store.masks, {entry.name: entry.unit_dim for entry in store.selected})
    if allocation.granularity == "unit":
        masks |= _bias_masks(store, masks)
    with context.stopwatch("refit"):
        refit = criterion.refit(context, masks)
    live: dict[str, Tensor] = dict(context.module.named_parameters()) | dict(context.module.named_buffers())
    _check_fit(f"{type(criterion).__name__}.refit", refit, live, complete=False)
    broadcast_from_rank_zero_(refit.values())
    return Plan(masks, refit)


def _bias_masks(store: MaskStore, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A removed unit must not go on emitting its bias."""
    biases: dict[str, Tensor] = {}
    for entry in store.selected:
        if entry.bias_name is not None:
            mask = masks[entry.name].movedim(entry.unit_dim, 0)
            biases[entry.bias_name] = mask.flatten(1).any(1)
    return biases


def _check_fit(what: str, tensors: Mapping[str, Tensor], live: Mapping[str, Tensor], *, complete: bool) -> None:
    if missing := [name for name in live if complete and name not in tensors]:
        raise ValueError(f"{what} must return a tensor for each weight; missing are {', '.join(missing)}.")
    for name, tensor in tensors.items():
        if name not in live or tensor.shape != live[name].shape:
            expected = tuple(live[name].shape) if name in live else "no such tensor"
            raise ValueError(f"{what} returned {name!r} with shape {tuple(tensor.shape)}; in the network: {expected}.")
        if not complete and not bool(tensor.isfinite().all()):
            raise ValueError(f"{what} returned values for {name!r} that are not finite. Nothing was pruned.")
