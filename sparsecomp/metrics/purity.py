"""Purity, as a metric."""

from typing import ClassVar

import torch
from torch import Tensor

from sparsecomp.metrics.base import NetworkMetric, check_live
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.purity import pure_units, purity
from sparsecomp.metrics.functional.sums import live_units
from sparsecomp.metrics.functional.undefined import UndefinedError
from sparsecomp.metrics.network import Part


class Purity(NetworkMetric):
    """Share of the live hidden units that depend on inputs of one true subtree only, in [0, 1].

    A unit of layer l is held against the nodes of level l; layers without a level below the outputs are left out. See
    `functional.pure_units`.
    """

    needs: ClassVar[frozenset[Part]] = frozenset({Part.ACTIVATIONS, Part.CONNECTIVITY, Part.GROUND_TRUTH})

    counts: Tensor
    totals: Tensor
    squares: Tensor
    pure: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("counts", "totals", "squares", "pure"):
            self.add_sum(name)

    def _add(self, batch: NetworkBatch) -> None:
        network = batch.network
        pure = pure_units(network.supports, network.layers, network.leaves, network.nodes.levels)
        if bool(pure.isnan().all()):
            raise UndefinedError("no hidden layer stands at a level of the true graph below its outputs.")
        hidden = batch.hidden()
        rows = [h.new_full((h.shape[1],), len(h), dtype=torch.float64) for h in hidden]
        self.counts = self.counts + torch.cat(rows)
        self.totals = self.totals + torch.cat([h.sum(0, dtype=torch.float64) for h in hidden])
        self.squares = self.squares + torch.cat([h.double().square().sum(0) for h in hidden])
        self.pure = self.pure + pure.to(self.counts.device)

    def _value(self) -> float:
        live = live_units(self.counts, self.totals, self.squares)
        check_live(live & ~self.pure.isnan())
        return purity(self.pure / self.batches, live)
