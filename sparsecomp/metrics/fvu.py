"""Fraction of variance unexplained, as a metric."""

from typing import ClassVar

from torch import Tensor

from sparsecomp.metrics.base import NetworkMetric
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.fvu import fvu_of_sums, fvu_sums
from sparsecomp.metrics.functional.undefined import UndefinedError
from sparsecomp.metrics.network import Part


class FVU(NetworkMetric):
    """Fraction of variance unexplained, >= 0; NaN where targets are class labels. See `functional.fvu`."""

    needs: ClassVar[frozenset[Part]] = frozenset({Part.OUTPUTS})

    sums: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("sums")

    def _add(self, batch: NetworkBatch) -> None:
        if batch.targets is None:
            raise UndefinedError("a batch has no targets: it must be (x, y).")
        self.sums = self.sums + fvu_sums(batch.outputs, batch.targets)

    def _value(self) -> float:
        return fvu_of_sums(self.sums)
