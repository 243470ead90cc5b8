"""One threshold for the whole network."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparsecomp.allocation.base import Allocation, Items, warn_guarded
from sparsecomp.allocation.smallest import keep_all_but_smallest


class Global(Allocation):
    """Drops the lowest scores of all parameters together, so that layers end at different sparsities.

    By default a parameter keeps one unit, or as many weights as the larger of its output units and its inputs, but no
    more than its uniform share, so that the scale of its weights cuts no layer off. Where this acts, the layer keeps
    the largest score of each output unit before any second one: a few weights leave a way through the layer if they
    feed many units, and the largest ones may all feed the same.

    Args:
        granularity: "weight", or "unit" for output rows and channels (ranked by the mean of their weights' scores).
        min_keep: Weights (or units) that every parameter keeps, >= 0; the default above if None.

    >>> masks = Global()({"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([2.0, 3.0])}, sparsity=0.5)
    >>> masks["a"].tolist(), masks["b"].tolist()
    ([False, True], [False, True])
    """

    name = "global"

    def _allocate(self, items: Mapping[str, Items], target: int, sparsity: float) -> dict[str, Tensor]:
        free = dict(items)
        floors = {name: self._floor(item, sparsity) for name, item in items.items()}
        guarded: dict[str, Tensor] = {}
        while True:
            fixed = sum(
                (items[name].count - int(kept.count_nonzero())) * items[name].size for name, kept in guarded.items()
            )
            kept, reached = _drop(free, target - fixed)
            emptied = [name for name in free if int(kept[name].count_nonzero()) < floors[name]]
            if not emptied:
                break
            for name in emptied:
                item = free.pop(name)
                over = int(item.alive.count_nonzero()) - floors[name]
                guarded[name] = keep_all_but_smallest([_spread(item)], max(over, 0), [item.alive])[0]
        warn_guarded({name: floors[name] for name in guarded}, reached)
        return kept | guarded

    def _default_floor(self, item: Items, sparsity: float) -> int:
        if self.granularity == "unit":
            return 1
        share = max(1, math.floor((1.0 - sparsity) * item.count + 1e-9))  # 0.1 * 40 is below 4 in floats
        return min(max(item.units, item.count // item.units), share)


def _spread(item: Items) -> Tensor:
    """Ranks in place of scores: the largest alive one of each output unit comes before all others."""
    if item.size > 1:
        return item.scores  # whole units
    scores = item.scores.double().masked_fill(~item.alive, -torch.inf).reshape(item.shape)
    by_unit = scores.movedim(item.unit_dim, 0).reshape(item.units, -1)
    first = by_unit.argmax(1, keepdim=True)
    largest = by_unit.gather(1, first)
    # A unit whose scores are all 0 or less is worth nothing to the criterion.
    chosen = torch.zeros_like(by_unit, dtype=torch.bool).scatter_(1, first, largest > 0)
    order = torch.zeros_like(item.scores, dtype=torch.int64)
    order[item.scores.argsort(stable=True)] = torch.arange(item.count, device=order.device)
    moved = [item.shape[item.unit_dim], *(n for dim, n in enumerate(item.shape) if dim != item.unit_dim)]
    return order + item.count * chosen.reshape(moved).movedim(0, item.unit_dim).flatten()


def _drop(items: Mapping[str, Items], target: int) -> tuple[dict[str, Tensor], bool]:
    """Drop items until `target` weights are gone; returns the kept masks and whether that many could go."""
    names = list(items)
    alive = [items[name].alive for name in names]
    scores = [items[name].scores for name in names]
    open_weights = sum(int(items[name].alive.count_nonzero()) * items[name].size for name in names)
    missing = max(0, target - sum(items[name].dropped * items[name].size for name in names))
    if missing > open_weights:
        return {
            name: torch.zeros_like(mask) for name, mask in zip(names, alive, strict=True)
        }, not names and missing == 0
    number = missing if all(items[name].size == 1 for name in names) else _units_for(items, missing)
    kept = keep_all_but_smallest(scores, number, alive) if names else []
    return dict(zip(names, kept, strict=True)), True


def _units_for(items: Mapping[str, Items], missing: int) -> int:
    """How many of the lowest alive units hold the number of weights nearest to `missing`."""
    scores = torch.cat([item.scores[item.alive] for item in items.values()])
    sizes = torch.cat([torch.full((int(item.alive.count_nonzero()),), item.size) for item in items.values()])
    freed = sizes[scores.argsort(stable=True).cpu()].cumsum(0)
    over = int((freed < missing).count_nonzero())  # the unit at this place passes the target
    before = int(freed[over - 1]) if over > 0 else 0
    nearer_with = over < freed.numel() and int(freed[over]) - missing < missing - before
    return over + int(nearer_with)
