"""An explicit list of sparsities."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from sparsecomp._checks import check_sparsity
from sparsecomp.schedules.base import Schedule, Unit, check_every, check_position, check_unit


@dataclass(frozen=True)
class Levels(Schedule):
    """One event for each listed total sparsity, at begin, begin + every, ...

    Args:
        sparsities: Total fractions of weights removed, each in [0, 1), not falling.
        begin: Position of the first event, in `unit`.
        every: Distance between events, in `unit`.
        unit: What positions count: completed "step"s or "epoch"s, or the "fraction" of the training in [0, 1].
        monotone: False allows sparsities that fall, for methods that let weights grow back.

    Raises:
        ValueError: If a value is out of its range, the list is empty, or it falls while `monotone` is true.
        TypeError: If a value has the wrong type.

    >>> schedule = Levels((0.5, 0.7, 0.9), begin=1)
    >>> [schedule.sparsity(epoch) for epoch in range(5)], schedule.final_sparsity
    ([0.0, 0.5, 0.7, 0.9, 0.9], 0.9)
    >>> [round(s, 6) for s in schedule.with_final_sparsity(0.45).sparsities]
    [0.25, 0.35, 0.45]
    """

    sparsities: tuple[float, ...]
    begin: int | float
    every: int | float = 1
    unit: Unit = "epoch"
    monotone: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.sparsities, str) or not isinstance(self.sparsities, Sequence) or not self.sparsities:
            raise ValueError(
                "`sparsities` is the total fraction removed at each event and must be a non-empty list of numbers in "
                f"[0, 1), such as [0.5, 0.7, 0.9]; got {self.sparsities!r}."
            )
        object.__setattr__(self, "sparsities", tuple(check_sparsity("sparsities", s) for s in self.sparsities))
        check_unit(self.unit)
        check_position("begin", self.begin, self.unit)
        check_every(self.every, self.unit)
        last = self.begin + (len(self.sparsities) - 1) * self.every
        check_position("begin + (len(sparsities) - 1) * every", last, self.unit)
        if self.monotone and not self.is_monotone:
            raise ValueError(
                "`sparsities` is the total fraction removed at each event and must not fall unless `monotone` is false; "
                f"got {list(self.sparsities)!r}."
            )

    @property
    def final_sparsity(self) -> float:
        """The last of `sparsities`."""
        return self.sparsities[-1]

    def with_final_sparsity(self, final_sparsity: float) -> Self:
        """A copy whose sparsities are all scaled so that the last one is `final_sparsity`."""
        check_sparsity("final_sparsity", final_sparsity)
        if self.final_sparsity == 0.0:
            raise ValueError("`sparsities` ends at 0, so that no factor scales it to another `final_sparsity`.")
        scale = final_sparsity / self.final_sparsity
        scaled = (s * scale for s in self.sparsities[:-1])
        if self.monotone:  # rounding must not lift one above the last
            scaled = (min(s, final_sparsity) for s in scaled)
        return replace(self, sparsities=(*scaled, final_sparsity))

    def _positions(self) -> Sequence[float]:
        return [self.begin + index * self.every for index in range(len(self.sparsities))]

    def _sparsity_of(self, index: int) -> float:
        return self.sparsities[index]
