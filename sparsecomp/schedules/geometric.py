"""The lottery-ticket rule: the same share of what remains, round by round."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsecomp._checks import check_int, check_sparsity
from sparsecomp.schedules.base import Schedule, Unit, check_every, check_position, check_unit


@dataclass(frozen=True)
class Geometric(Schedule):
    """Remove the same share of the remaining weights in each of `rounds` events.

    s_r = 1 - (1 - final_sparsity) ** (r / rounds) for r = 1 ... rounds; the share, `rate`, follows from the final
    sparsity: 1 - (1 - final_sparsity) ** (1 / rounds).

    Args:
        final_sparsity: Fraction of weights removed after the last round, in [0, 1).
        rounds: Number of events, >= 1.
        begin: Position of the first event, in `unit`.
        every: Distance between events, in `unit`.
        unit: What positions count: completed "step"s or "epoch"s, or the "fraction" of the training in [0, 1].

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If a value has the wrong type.

    Reference:
        J. Frankle, M. Carbin: The Lottery Ticket Hypothesis, arXiv 1803.03635, section 1 (p ** (1/n) each round).

    >>> schedule = Geometric(0.875, rounds=3, begin=2, every=2)
    >>> [schedule.sparsity(epoch) for epoch in range(8)]
    [0.0, 0.0, 0.5, 0.5, 0.75, 0.75, 0.875, 0.875]
    """

    final_sparsity: float
    rounds: int
    begin: int | float
    every: int | float = 1
    unit: Unit = "epoch"

    def __post_init__(self) -> None:
        check_sparsity("final_sparsity", self.final_sparsity)
        check_int("rounds", self.rounds, "the number of pruning events", minimum=1)
        check_unit(self.unit)
        check_position("begin", self.begin, self.unit)
        check_every(self.every, self.unit)
        last = self.begin + (self.rounds - 1) * self.every
        if self.unit == "fraction" and last > 1.0 + 1e-9:
            raise ValueError(
                f"`rounds`={self.rounds!r} events from `begin`={self.begin!r}, `every`={self.every!r}, end at {last:g} "
                "of the training, beyond its end at 1; use fewer rounds or a smaller `every`."
            )

    @property
    def rate(self) -> float:
        """Share of the remaining weights removed in each round."""
        return 1.0 - float((1.0 - self.final_sparsity) ** (1.0 / self.rounds))

    def _positions(self) -> Sequence[float]:
        return [self.begin + index * self.every for index in range(self.rounds)]

    def _sparsity_of(self, index: int) -> float:
        if index == self.rounds - 1:
            return self.final_sparsity
        # Rounding must not lift one above the last.
        return min(self.final_sparsity, 1.0 - float((1.0 - self.final_sparsity) ** ((index + 1) / self.rounds)))
