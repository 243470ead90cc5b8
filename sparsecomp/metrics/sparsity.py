"""Nominal and effective sparsity, as metrics."""

from typing import ClassVar

from torch import Tensor

from sparsecomp.connectivity import effective_sparsity
from sparsecomp.metrics.base import NetworkMetric
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.sparsity import sparsity
from sparsecomp.metrics.network import Part


class Sparsity(NetworkMetric):
    """Fraction of the masked weights that is removed, in [0, 1]; see `functional.sparsity`."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("total")

    def _add(self, batch: NetworkBatch) -> None:
        self.total = self.total + sparsity(batch.network.masks)

    def _value(self) -> float:
        return float(self.total / self.batches)


class EffectiveSparsity(NetworkMetric):
    """Fraction of the masked weights on no path from an input to an output; NaN where the network cannot be traced.

    See `connectivity.effective_sparsity`; in [0, 1], never under the nominal sparsity.
    """

    needs: ClassVar[frozenset[Part]] = frozenset({Part.CONNECTIVITY})

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("total")

    def _add(self, batch: NetworkBatch) -> None:
        self.total = self.total + effective_sparsity(batch.network.traced, batch.network.masks)

    def _value(self) -> float:
        return float(self.total / self.batches)
