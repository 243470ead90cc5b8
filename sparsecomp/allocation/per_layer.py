"""The common part of allocations that give every parameter a budget of its own."""

import math
from abc import abstractmethod
from collections.abc import Mapping

from torch import Tensor

from sparsecomp.allocation.base import Allocation, Items, warn_guarded
from sparsecomp.allocation.smallest import keep_all_but_smallest


class PerLayer(Allocation):
    """A subclass says what share of each parameter is dropped; the lowest scores within each go.

    With weights the total is exact and each parameter within one weight of its share, unless `min_keep` or an earlier
    mask moves it; with units each parameter drops the number of units nearest to its share.
    """

    @abstractmethod
    def layer_sparsities(self, shapes: Mapping[str, tuple[int, ...]], sparsity: float) -> dict[str, float]:
        """Return the fraction dropped of each parameter, so that they amount to `sparsity` in all.

        Args:
            shapes: Parameter name to its shape.
            sparsity: Fraction dropped of all weights together, in [0, 1).
        """

    def _allocate(self, items: Mapping[str, Items], target: int, sparsity: float) -> dict[str, Tensor]:
        shares = self.layer_sparsities({name: item.shape for name, item in items.items()}, sparsity)
        wanted = {name: shares[name] * item.count for name, item in items.items()}
        lowest = {name: item.dropped for name, item in items.items()}
        highest = {name: max(item.dropped, item.count - self._floor(item, sparsity)) for name, item in items.items()}
        if self.granularity == "weight":
            counts = _round_to_total(wanted, lowest, highest, target)
        else:
            counts = {name: _clamp(math.floor(wanted[name] + 0.5), lowest[name], highest[name]) for name in items}
        dropped = sum(counts[name] * item.size for name, item in items.items())
        warn_guarded(
            {name: items[name].count - counts[name] for name in items if wanted[name] > highest[name]},
            reached=self.granularity == "weight" and dropped == target,
        )
        return {
            name: keep_all_but_smallest([item.scores], counts[name] - item.dropped, [item.alive])[0]
            for name, item in items.items()
        }


def _round_to_total(
    wanted: Mapping[str, float], lowest: Mapping[str, int], highest: Mapping[str, int], target: int
) -> dict[str, int]:
    """Round to integers within their bounds that add up to `target`, the largest remainders first."""
    counts = {name: _clamp(math.floor(value), lowest[name], highest[name]) for name, value in wanted.items()}
    by_remainder = sorted(wanted, key=lambda name: counts[name] - wanted[name])
    while missing := target - sum(counts.values()):
        bound, order = (highest, by_remainder) if missing > 0 else (lowest, by_remainder[::-1])
        movable = [name for name in order if counts[name] != bound[name]]
        if not movable:
            break
        share = max(1, abs(missing) // len(movable))
        for name in movable[: abs(missing)]:
            step = min(share, abs(bound[name] - counts[name]))
            counts[name] += step if missing > 0 else -step
    return counts


def _clamp(value: int, lowest: int, highest: int) -> int:
    return min(max(value, lowest), highest)
