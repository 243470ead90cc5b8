"""The common part of schedules that rise from one sparsity to another between two positions."""

from abc import abstractmethod
from collections.abc import Sequence

from sparsecomp._checks import check_sparsity
from sparsecomp.schedules.base import Schedule, Unit, check_every, check_position, check_unit


class Ramp(Schedule):
    """Events from `begin` to `end`, one each `every`, and one at `end` in any case.

    A subclass is a frozen dataclass with these fields, in the order it likes, and gives `_risen(u)`, the share of the
    way from `initial_sparsity` to `final_sparsity` that is done at u = (position - begin) / (end - begin).
    """

    final_sparsity: float
    begin: int | float
    end: int | float
    every: int | float
    initial_sparsity: float
    unit: Unit

    def __post_init__(self) -> None:
        check_sparsity("final_sparsity", self.final_sparsity)
        check_sparsity("initial_sparsity", self.initial_sparsity, "the fraction of weights removed at `begin`")
        if self.initial_sparsity > self.final_sparsity:
            raise ValueError(
                "`initial_sparsity` is the fraction of weights removed at `begin` and must not exceed "
                f"`final_sparsity`={self.final_sparsity!r}; got {self.initial_sparsity!r}."
            )
        check_unit(self.unit)
        check_position("begin", self.begin, self.unit)
        check_position("end", self.end, self.unit)
        check_every(self.every, self.unit)
        if self.end < self.begin:
            raise ValueError(
                f"`end` is the position of the last event and must be >= `begin`={self.begin!r}; got {self.end!r}."
            )

    @abstractmethod
    def _risen(self, u: float) -> float:
        """Share of the rise done at u in [0, 1]; 0 at 0 and 1 at 1."""

    def _positions(self) -> Sequence[float]:
        begin, end = (check_position("position", p, self.unit) for p in (self.begin, self.end))
        count = int((end - begin) / self.every + 1e-9) + 1
        inner = (begin + index * self.every for index in range(count))
        return [*(position for position in inner if position < end - 1e-9), end]

    def _sparsity_of(self, index: int) -> float:
        # Exact ends: a rounded formula would log .8999999 and prune one weight too few.
        if index == len(self.positions) - 1:
            return self.final_sparsity
        if index == 0:
            return self.initial_sparsity
        u = (self.positions[index] - self.positions[0]) / (self.positions[-1] - self.positions[0])
        risen = self.initial_sparsity + (self.final_sparsity - self.initial_sparsity) * self._risen(u)
        return min(risen, self.final_sparsity)  # rounding must not lift one above the last
