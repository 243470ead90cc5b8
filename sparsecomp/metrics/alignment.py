"""Node alignment, as a metric."""

from typing import ClassVar

from torch import Tensor

from sparsecomp.metrics.base import NetworkMetric, check_live
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.alignment import node_alignment
from sparsecomp.metrics.functional.sums import UnitSums, correlation, live_units, unit_sums
from sparsecomp.metrics.network import Part


class NodeAlignment(NetworkMetric):
    """Mean |correlation| of the true internal nodes, matched one to one with live hidden units, in [0, 1].

    See `functional.node_alignment`.
    """

    needs: ClassVar[frozenset[Part]] = frozenset({Part.ACTIVATIONS, Part.CONNECTIVITY, Part.GROUND_TRUTH})

    counts: Tensor
    totals: Tensor
    products: Tensor
    nodes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in (*UnitSums._fields, "nodes"):
            self.add_sum(name)

    def _add(self, batch: NetworkBatch) -> None:
        values = batch.node_values()
        counts, totals, products = unit_sums([*batch.hidden(), values])
        self.counts, self.totals, self.products = self.counts + counts, self.totals + totals, self.products + products
        self.nodes = self.nodes + values.shape[1]

    def _value(self) -> float:
        sums = UnitSums(self.counts, self.totals, self.products)
        units = len(sums.totals) - int(self.nodes / self.batches)
        check_live(live_units(sums.counts, sums.totals, sums.products.diagonal())[:units])
        return node_alignment(correlation(sums)[units:, :units])  # a unit that is not live has correlation 0
