"""Selecting at an effective sparsity: dangling connections go, and what is left is what counts."""

import functools
import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from sparsecomp._checks import check_sparsity
from sparsecomp.allocation.base import check_scores
from sparsecomp.connectivity.graph import ConnectivityGraph
from sparsecomp.connectivity.reachability import blocks, live_connections, propagate, sides, through_all
from sparsecomp.connectivity.steps import WeightUse

_SAMPLE = 1 << 16
# Half the width of the bracket in standard deviations of a sample quantile: missed about once in 10^9 calls.
_WIDTH = 6.0
_INFINITY = float("inf")


def allocate_effective(
    graph: ConnectivityGraph,
    scores: Mapping[str, Tensor],
    target: float,
    masks: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Masks of the largest scores whose effective sparsity is the nearest reachable one not below the target.

    Of all prefixes of the ranking (larger scores first, among equal ones those at later positions) the longest is
    taken whose live connections are at most (1 - target) * N; of it only these are kept, so that nominal and effective
    sparsity of the result are the same. What an earlier mask dropped stays dropped. A dropped connection from a unit
    that no input reaches carried a constant, which a refit may add to the bias of its reader.

    No prefix is searched. A connection is live as soon as the weakest link of its best path is kept, at the level

        tau_uv = min(forward_u, score_uv, backward_v),   forward_v = max_u min(forward_u, score_uv), input = infinity,

    and likewise backward from the outputs. So the number live at a threshold t is that of tau >= t, and the threshold
    is an order statistic of tau. Only among scores equal to it a bisection over reachability decides.

    Args:
        graph: The network's connectivity.
        scores: Weight name to finite scores of the weight's shape; larger = keep. N counts all of them. Weights of the
            network that are not named stay whole.
        target: Effective sparsity, in [0, 1).
        masks: The masks so far, for all or some of the names.

    Returns:
        A bool mask for each score tensor, True = kept.

    Raises:
        TypeError: If a mask is not bool.
        ValueError: If `target` is outside [0, 1), scores are empty, not finite, or of parameters that connect no
            units, shapes do not fit, or the target leaves no path from an input to an output although there is one.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    >>> scores = {"0.weight": torch.tensor([[9.0, 8.0], [7.0, 1.0]]), "1.weight": torch.tensor([[2.0, 3.0]])}
    >>> kept = allocate_effective(ConnectivityGraph.trace(net), scores, 0.5)  # 9 and 8 go on only with 2
    >>> kept["0.weight"].tolist(), kept["1.weight"].tolist()
    ([[False, False], [True, False]], [[False, True]])
    """
    check_sparsity("target", target, "the fraction of weights that are not live")
    check_scores(scores)
    graph.check_names("scores", scores)
    masks = {name: mask for name, mask in (masks or {}).items() if name in scores}
    graph.check_masks("masks", masks)
    if unitwise := [name for name in scores if name in graph.unitwise]:
        raise ValueError(
            f"`scores` are of weights that connect units, and {', '.join(unitwise)} connects none; leave it out of the "
            "selection, or select by nominal sparsity."
        )
    levels = _Levels(graph, scores, masks)
    total = sum(score.numel() for score in scores.values())
    allowed = total - _fewest_dropped(target, total)
    threshold = levels.order_statistic(allowed)
    kept = {name: levels.above(name, threshold) for name in scores}
    if threshold > -_INFINITY:
        kept = _with_ties(graph, levels, kept, threshold, allowed)
        if not any(bool(mask.any()) for mask in kept.values()):
            raise ValueError(
                f"`target` is the effective sparsity and leaves {allowed} of {total} weights, fewer than the best path "
                f"from an input to an output needs, at {target!r}. Lower the target, or select by nominal sparsity."
            )
    return kept


def _fewest_dropped(target: float, total: int) -> int:
    """The least d with d / total >= target, as floats compare."""
    dropped = math.ceil(target * total)
    while dropped > 0 and (dropped - 1) / total >= target:
        dropped -= 1
    while dropped / total < target:
        dropped += 1
    return dropped


class _Levels:
    """For each weight the level tau at which its connection becomes live; computed block by block, never stored."""

    def __init__(self, graph: ConnectivityGraph, scores: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> None:
        dtype = functools.reduce(torch.promote_types, (score.dtype for score in scores.values()), torch.float32)
        first = next(iter(scores.values()))
        self.shapes = {name: score.shape for name, score in scores.items()}
        self.scores = {
            name: score.detach().to(first.device, dtype).contiguous().view(score.shape[0], -1)
            for name, score in scores.items()
        }
        self.alive = {
            name: mask.to(first.device).contiguous().view(mask.shape[0], -1)
            for name, mask in masks.items()
            if not bool(mask.all())
        }
        self.uses = graph.uses
        self.count = sum(score.numel() for score in scores.values())
        # One block for all intermediate results: allocating each anew takes longer than the arithmetic.
        self._block = torch.empty(0, dtype=dtype, device=first.device)
        bottom = torch.full((), -_INFINITY, dtype=dtype, device=first.device)
        forward, backward = propagate(graph, self._across, self._across_back, bottom, -bottom)
        self.sides = {name: [sides(use, forward, backward) for use in self.uses.get(name, [])] for name in self.scores}

    def above(self, name: str, threshold: float) -> Tensor:
        """Mask of the weights with tau > threshold."""
        kept = torch.zeros(self.scores[name].shape, dtype=torch.bool, device=self.scores[name].device)
        for part, level in self._blocks(name):
            _greater(level, threshold, kept[part])
        return kept.view(self.shapes[name])

    def ties(self, name: str, value: float) -> Tensor:
        """Places of alive weights whose score equals `value`, ascending."""
        equal = _matches(self.scores[name].view(-1), value, value)
        return equal[self.alive[name].view(-1)[equal]] if name in self.alive else equal

    def order_statistic(self, above: int) -> float:
        """The largest level of which more than `above` weights are at or over it; -inf if no live one is."""
        if above >= self.count:
            return -_INFINITY
        low, high = self._bracket(above)
        for bounds in ((low, high), (-_INFINITY, _INFINITY)):  # the second if the sample was unlucky
            over, pool = self._pool(*bounds)
            if over <= above < over + pool.numel():
                return float(pool.kthvalue(pool.numel() - (above - over)).values)
        return -_INFINITY

    def _pool(self, low: float, high: float) -> tuple[int, Tensor]:
        """How many levels are over `high`, and the levels in [low, high]."""
        over, parts = 0, []
        for name in self.scores:
            for _, level in self._blocks(name):
                over += _count_over(level, high)
                flat = level.view(-1)
                parts.append(flat[_matches(flat, low, high)])
        return over, torch.cat(parts)

    def _bracket(self, above: int) -> tuple[float, float]:
        """Two levels that the wanted one very likely lies between."""
        generator = torch.Generator().manual_seed(0)
        drawn = []
        for name, score in self.scores.items():
            size = max(1, round(_SAMPLE * score.numel() / self.count))
            if size >= score.numel():
                places = torch.arange(score.numel(), device=score.device)
            else:
                places = torch.randint(score.numel(), (size,), generator=generator).to(score.device)
            drawn.append(self._at(name, places))
        sample = torch.cat(drawn).sort(descending=True).values
        n, share = sample.numel(), above / self.count
        margin = int(_WIDTH * (n * share * (1 - share)) ** 0.5) + 8
        centre = int(share * n)
        high = float(sample[centre - margin]) if centre >= margin else _INFINITY
        low = float(sample[centre + margin]) if centre + margin < n else -_INFINITY
        return low, high

    def _at(self, name: str, places: Tensor) -> Tensor:
        """Levels at places of the flattened weight."""
        score = self.scores[name]
        level = score.new_full(places.shape, -_INFINITY)
        row, column = places // score.shape[1], places % score.shape[1]
        for use, (rows, columns) in zip(self.uses.get(name, []), self.sides[name], strict=True):
            group = row // (score.shape[0] // use.groups)
            best = torch.minimum(rows[row], columns[group, column])
            level = torch.maximum(level, torch.minimum(best, score.view(-1)[places]))
        return level.masked_fill(~self.alive[name].view(-1)[places], -_INFINITY) if name in self.alive else level

    def _blocks(self, name: str) -> Iterator[tuple[slice, Tensor]]:
        """Levels of a range of rows after the other."""
        score, uses = self.scores[name], self.uses.get(name, [])
        if not uses:
            yield slice(None), torch.full_like(score, -_INFINITY)
            return
        for use_blocks in zip(*(blocks(use, score) for use in uses), strict=True):
            best: Tensor | None = None
            for (part, groups), (rows, columns) in zip(use_blocks, self.sides[name], strict=True):
                level = self._capped(name, part, columns[groups])
                torch.minimum(level, rows[part, None], out=level)
                if len(uses) > 1:
                    level = level.clone()
                best = level if best is None else torch.maximum(best, level)
            assert best is not None
            yield part, best

    def _capped(self, name: str, part: slice, cap: Tensor) -> Tensor:
        """min(score, cap) of a range of rows, -inf where an earlier event pruned; overwritten by the next call."""
        score = self.scores[name][part]
        if self._block.numel() < score.numel():
            self._block = score.new_empty(score.numel())
        level = self._block[: score.numel()].view(score.shape)
        if name not in self.alive:
            return torch.minimum(score, cap, out=level)
        # +inf where alive, -inf elsewhere: several times faster than `where` on a CPU.
        level.copy_(self.alive[name][part]).sub_(0.5).mul_(_INFINITY)
        torch.minimum(level, score, out=level)
        return torch.minimum(level, cap, out=level)

    def _across(self, use: WeightUse, units: Tensor) -> Tensor:
        if use.name not in self.scores:
            return through_all(use, units, use.target_size)
        return self._best_of_rows(use, units) if use.transposed else self._best_of_columns(use, units)

    def _across_back(self, use: WeightUse, units: Tensor) -> Tensor:
        if use.name not in self.scores:
            return through_all(use, units, use.source_size)
        return self._best_of_columns(use, units) if use.transposed else self._best_of_rows(use, units)

    def _best_of_columns(self, use: WeightUse, units: Tensor) -> Tensor:
        """For each row the best way in from the units of its columns."""
        columns = use.columns(units)
        best = units.new_empty(len(self.scores[use.name]))
        for part, groups in blocks(use, self.scores[use.name]):
            best[part] = self._capped(use.name, part, columns[groups]).amax(1)
        return best

    def _best_of_rows(self, use: WeightUse, units: Tensor) -> Tensor:
        """For each unit of the columns the best way in from the rows."""
        score = self.scores[use.name]
        best = score.new_full((use.groups, score.shape[1]), -_INFINITY)
        for part, groups in blocks(use, score):
            level = self._capped(use.name, part, units[part, None])
            if use.groups == 1:
                best[0] = torch.maximum(best[0], level.amax(0))
            else:
                best.scatter_reduce_(0, groups[:, None].expand(level.shape), level, "amax")
        return use.units(best)


def _with_ties(
    graph: ConnectivityGraph, levels: _Levels, live: dict[str, Tensor], threshold: float, allowed: int
) -> dict[str, Tensor]:
    """Take as many of the scores equal to the threshold as fit, later positions first, and return what is then live."""
    ties = {name: levels.ties(name, threshold) for name in live}
    count = sum(places.numel() for places in ties.values())
    if count == 1:  # with it too many are live, as the threshold says
        return live
    nominal = {}
    for name, score in levels.scores.items():
        kept = torch.empty(score.shape, dtype=torch.bool, device=score.device)
        _greater(score, threshold, kept)
        nominal[name] = (kept & levels.alive[name] if name in levels.alive else kept).view(levels.shapes[name])
    fits, too_many = 0, count
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        trial, skipped = {}, count - middle
        for name, mask in nominal.items():
            taken = ties[name][skipped:]
            skipped = max(0, skipped - ties[name].numel())
            trial[name] = mask.clone()
            trial[name].view(-1)[taken] = True
        found = live_connections(graph, trial)
        if sum(int(mask.count_nonzero()) for mask in found.values()) <= allowed:
            fits, live = middle, found
        else:
            too_many = middle
    return live


# numpy compares ten times faster than torch on a CPU.


def _greater(values: Tensor, threshold: float, out: Tensor) -> None:
    if values.device.type == "cpu":
        array = values.numpy()
        np.greater(array, array.dtype.type(threshold), out=out.numpy())
    else:
        torch.gt(values, threshold, out=out)


def _count_over(values: Tensor, threshold: float) -> int:
    if values.device.type == "cpu":
        array = values.numpy()
        return int(np.count_nonzero(array > array.dtype.type(threshold)))
    return int((values > threshold).count_nonzero())


def _matches(values: Tensor, low: float, high: float) -> Tensor:
    """Places of the values in [low, high]."""
    if values.device.type == "cpu":
        array = values.numpy()
        within = array >= array.dtype.type(low)
        within &= array <= array.dtype.type(high)
        return torch.from_numpy(np.flatnonzero(within))
    return ((values >= low) & (values <= high)).nonzero().flatten()
