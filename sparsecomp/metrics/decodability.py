"""Decodability, as a metric."""

from typing import ClassVar

import torch
from torch import Tensor

from sparsecomp.metrics.base import NetworkMetric, check_live
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.decodability import decodability
from sparsecomp.metrics.functional.purity import supported_inside
from sparsecomp.metrics.functional.sums import UnitSums, live_units, unit_sums
from sparsecomp.metrics.functional.undefined import UndefinedError
from sparsecomp.metrics.network import Part


class Decodability(NetworkMetric):
    """Mean held-out R^2 of the true internal nodes from the live units within their subtrees, <= 1.

    The readout is fitted on every other row of each batch and judged on the rest. The outputs are left out. See
    `functional.decodability`.
    """

    needs: ClassVar[frozenset[Part]] = frozenset({Part.ACTIVATIONS, Part.CONNECTIVITY, Part.GROUND_TRUTH})

    counts: Tensor
    totals: Tensor
    products: Tensor
    inside: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in (*UnitSums._fields, "inside"):
            self.add_sum(name)

    def _add(self, batch: NetworkBatch) -> None:
        inside = supported_inside(batch.network.supports, batch.network.leaves)
        columns = [*batch.hidden(), batch.node_values()]
        halves = [unit_sums([column[half::2] for column in columns]) for half in (0, 1)]
        counts, totals, products = (torch.stack(both) for both in zip(*halves, strict=True))
        self.counts, self.totals, self.products = self.counts + counts, self.totals + totals, self.products + products
        self.inside = self.inside + inside.to(counts)

    def _value(self) -> float:
        fit, held_out = (UnitSums(*sums) for sums in zip(self.counts, self.totals, self.products, strict=True))
        units = self.inside.shape[1]
        check_live(live_units(fit.counts, fit.totals, fit.products.diagonal())[:units])
        if held_out.counts.min() < 2:
            raise UndefinedError("there are fewer than 2 held-out samples.")
        return float(decodability(fit, held_out, self.inside == self.batches).mean())
