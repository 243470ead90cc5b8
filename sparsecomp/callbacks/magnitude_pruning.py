"""Gradual magnitude pruning with settings that suit most trainings."""

from sparsecomp.allocation import Allocation
from sparsecomp.callbacks.pruning import Pruning
from sparsecomp.criteria.magnitude import Magnitude
from sparsecomp.rewinding import Rewind
from sparsecomp.schedules import Schedule
from sparsecomp.schedules.polynomial import Polynomial
from sparsecomp.selection import Selection


class MagnitudePruning(Pruning):
    """`Pruning` by `Magnitude`; by default to sparsity 0.9 over the first 60% of the training, 20 events, cubic.

    Args:
        schedule: When to prune and to what total sparsity; the default above if None.
        allocation: Scores to masks: an `Allocation`, or "global", "layerwise" or "erk".
        selection: What is prunable; the default of `Selection` if None.
        rewind: When to take the snapshot that events go back to, and what they restore; None does not rewind.

    Raises:
        ValueError, TypeError: As `Pruning`.

    >>> MagnitudePruning().schedule.final_sparsity
    0.9
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        allocation: Allocation | str = "global",
        selection: Selection | None = None,
        rewind: Rewind | None = None,
    ) -> None:
        schedule = schedule or Polynomial(0.9, begin=0.03, end=0.6, every=0.03, unit="fraction")
        super().__init__(Magnitude(), schedule, allocation, selection, rewind)
