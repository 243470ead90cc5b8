"""A straight rise."""

from dataclasses import dataclass

from sparsecomp.schedules.base import Unit
from sparsecomp.schedules.ramp import Ramp


@dataclass(frozen=True)
class Linear(Ramp):
    """Rise by the same amount at each event: s(t) = s_i + (s_f - s_i) (t - begin) / (end - begin).

    Args:
        final_sparsity: s_f, fraction of weights removed at `end`, in [0, 1).
        begin: Position of the first event, in `unit`.
        end: Position of the last event; equal to `begin` it prunes once.
        every: Distance between events, in `unit`.
        initial_sparsity: s_i, fraction removed at `begin`, in [0, final_sparsity].
        unit: What positions count: completed "step"s or "epoch"s, or the "fraction" of the training in [0, 1].

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If a value has the wrong type.

    >>> schedule = Linear(0.8, begin=1, end=5, every=2)
    >>> [schedule.sparsity(epoch) for epoch in range(7)]
    [0.0, 0.0, 0.0, 0.4, 0.4, 0.8, 0.8]
    """

    final_sparsity: float
    begin: int | float
    end: int | float
    every: int | float = 1
    initial_sparsity: float = 0.0
    unit: Unit = "epoch"

    def _risen(self, u: float) -> float:
        return u
