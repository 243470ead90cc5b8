"""How many inputs hidden units depend on, as metrics."""

from typing import ClassVar

import torch
from torch import Tensor

from sparsecomp.metrics.base import NetworkMetric
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.network import Part


class ConstituentArity(NetworkMetric):
    """Mean number of the network's inputs that a hidden unit depends on through the masks; see `constituent_arity`."""

    needs: ClassVar[frozenset[Part]] = frozenset({Part.CONNECTIVITY})

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("total")

    def _add(self, batch: NetworkBatch) -> None:
        self.total = self.total + float(batch.network.arity.double().mean())

    def _value(self) -> float:
        return float(self.total / self.batches)


class LargestArity(NetworkMetric):
    """The largest number of the network's inputs that a hidden unit depends on; see `constituent_arity`."""

    needs: ClassVar[frozenset[Part]] = frozenset({Part.CONNECTIVITY})

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")

    def _add(self, batch: NetworkBatch) -> None:
        self.largest = self.largest.clamp(min=float(batch.network.arity.max()))

    def _value(self) -> float:
        return float(self.largest)
