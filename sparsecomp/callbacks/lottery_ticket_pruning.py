"""Iterative magnitude pruning with rewinding: the lottery ticket."""

from sparsecomp.allocation import Allocation
from sparsecomp.callbacks.pruning import Pruning
from sparsecomp.criteria.magnitude import Magnitude
from sparsecomp.rewinding import Rewind
from sparsecomp.schedules import Schedule
from sparsecomp.schedules.geometric import Geometric
from sparsecomp.selection import Selection


class LotteryTicketPruning(Pruning):
    """`Pruning` by `Magnitude` with a rewind; by default to sparsity 0.9 in 3 rounds, at 20, 40 and 60% of the training.

    The last 40% train the winning ticket.

    Args:
        schedule: When to prune and to what total sparsity; the default above if None.
        allocation: Scores to masks: an `Allocation`, or "global", "layerwise" or "erk".
        selection: What is prunable; the default of `Selection` if None.
        rewind: When to take the snapshot that events go back to, and what they restore; the initialisation and
            everything if None.

    Raises:
        ValueError, TypeError: As `Pruning`.

    Reference:
        J. Frankle, M. Carbin: The Lottery Ticket Hypothesis, arXiv 1803.03635. There each round trains to the end and
        layers lose the same share; here rounds share one training, and the default allocation is global.

    >>> [round(LotteryTicketPruning().schedule.sparsity(p), 3) for p in (0.1, 0.2, 0.4, 0.6)]
    [0.0, 0.536, 0.785, 0.9]
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        allocation: Allocation | str = "global",
        selection: Selection | None = None,
        rewind: Rewind | None = None,
    ) -> None:
        schedule = schedule or Geometric(0.9, rounds=3, begin=0.2, every=0.2, unit="fraction")
        super().__init__(Magnitude(), schedule, allocation, selection, rewind or Rewind())
