"""Effective fan-in, as a metric."""

from typing import ClassVar

import torch
from torch import Tensor

from sparsecomp.metrics.base import NetworkMetric
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.fan_in import effective_fan_in
from sparsecomp.metrics.functional.undefined import UndefinedError
from sparsecomp.metrics.network import Part


class EffectiveFanIn(NetworkMetric):
    """Mean effective fan-in of the units, outputs included, that read anything; see `functional.effective_fan_in`.

    The weights are those of the latest batch. Copies of a unit are counted each.
    """

    needs: ClassVar[frozenset[Part]] = frozenset({Part.ACTIVATIONS})

    counts: Tensor
    squares: Tensor
    _layers: list[tuple[Tensor, int]]  # weight and number of inputs

    def __init__(self) -> None:
        super().__init__()
        self.add_sum("counts")
        self.add_sum("squares")
        self._layers = []

    def _add(self, batch: NetworkBatch) -> None:
        read = {name: batch.activations[name] for name in batch.network.weights if name in batch.activations}
        if not read:
            raise UndefinedError("the forward pass calls no Linear or convolution.")
        self._layers = [(batch.network.weights[name], h.shape[1]) for name, h in read.items()]
        rows = [h.new_full((h.shape[1],), len(h), dtype=torch.float64) for h in read.values()]
        self.counts = self.counts + torch.cat(rows)
        self.squares = self.squares + torch.cat([h.square().sum(0, dtype=torch.float64) for h in read.values()])

    def _value(self) -> float:
        if not self._layers:
            raise UndefinedError(
                "the weights are those of the latest batch, and none was seen since the sums were loaded."
            )
        moments = (self.squares / self.counts).split([inputs for _, inputs in self._layers])
        pairs = zip(self._layers, moments, strict=True)
        units = torch.cat([effective_fan_in(weight, moment) for (weight, _), moment in pairs])
        if not bool(units.any()):
            raise UndefinedError("no unit reads anything.")
        return float(units[units > 0].mean())
