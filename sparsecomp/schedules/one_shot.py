"""Prune once."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsecomp._checks import check_sparsity
from sparsecomp.schedules.base import Schedule, Unit, check_position, check_unit


@dataclass(frozen=True)
class OneShot(Schedule):
    """One event that reaches the final sparsity at once.

    Args:
        final_sparsity: Fraction of weights removed, in [0, 1).
        at: Position of the event; 0 prunes at initialisation, before the first update.
        unit: What `at` counts: completed "step"s or "epoch"s, or the "fraction" of the training in [0, 1].

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If a value has the wrong type.

    >>> schedule = OneShot(0.8, at=2)
    >>> schedule.sparsity(1), schedule.sparsity(2), schedule.is_event(2), schedule.is_event(3)
    (0.0, 0.8, True, False)
    """

    final_sparsity: float
    at: int | float
    unit: Unit = "epoch"

    def __post_init__(self) -> None:
        check_sparsity("final_sparsity", self.final_sparsity)
        check_unit(self.unit)
        check_position("at", self.at, self.unit)

    def _positions(self) -> Sequence[float]:
        return (check_position("at", self.at, self.unit),)

    def _sparsity_of(self, index: int) -> float:
        return self.final_sparsity
