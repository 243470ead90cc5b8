"""Similarity-based pruning with settings that suit most trainings."""

from typing import Literal

from sparsecomp.callbacks.pruning import Pruning
from sparsecomp.criteria.similarity import Similarity
from sparsecomp.probe import Probe
from sparsecomp.schedules import Schedule
from sparsecomp.schedules.levels import Levels
from sparsecomp.selection import Selection


class SimilarityPruning(Pruning):
    """`Pruning` by `Similarity`; by default to sparsity 0.5, 0.7, 0.8, 0.9 at 15, 30, 45 and 60% of the training.

    Args:
        gamma: 0, 1 or 2; see `Similarity`.
        merge: |Correlation| from which hidden units are merged, or None; see `Similarity`.
        schedule: When to prune and to what total sparsity; the default above if None. At least 4 events are advised.
        selection: What is prunable; the default of `Selection` if None.
        target: Whether the sparsity is "nominal" or "effective"; see `Pruning`.
        probe: What the input and the output of the module are, and how many batches statistics use; see `Probe`.

    Raises:
        ValueError, TypeError: As `Pruning` and `Similarity`.

    >>> SimilarityPruning().schedule.sparsities
    (0.5, 0.7, 0.8, 0.9)
    """

    def __init__(
        self,
        gamma: int = 0,
        merge: float | None = None,
        schedule: Schedule | None = None,
        selection: Selection | None = None,
        target: Literal["nominal", "effective"] = "nominal",
        probe: Probe | None = None,
    ) -> None:
        schedule = schedule or Levels((0.5, 0.7, 0.8, 0.9), begin=0.15, every=0.15, unit="fraction")
        super().__init__(Similarity(gamma, merge), schedule, selection=selection, target=target, probe=probe)
