"""Number of distinct functions, as a metric."""

from typing import ClassVar

from torch import Tensor

from sparsecomp.metrics.base import NetworkMetric, check_live
from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.distinct import distinct_functions
from sparsecomp.metrics.functional.sums import UnitSums, correlation, live_units, unit_sums
from sparsecomp.metrics.functional.undefined import UndefinedError
from sparsecomp.metrics.network import Part


class DistinctFunctions(NetworkMetric):
    """How many different functions the live units of all hidden layers compute; see `functional.distinct_functions`.

    Its state has (hidden units)^2 numbers. Layers of other resolutions share no function.
    """

    needs: ClassVar[frozenset[Part]] = frozenset({Part.ACTIVATIONS, Part.CONNECTIVITY})

    counts: Tensor
    totals: Tensor
    products: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in UnitSums._fields:
            self.add_sum(name)

    def _add(self, batch: NetworkBatch) -> None:
        if not batch.network.hidden:
            raise UndefinedError("the network has no hidden units.")
        counts, totals, products = unit_sums(batch.hidden())
        self.counts, self.totals, self.products = self.counts + counts, self.totals + totals, self.products + products

    def _value(self) -> float:
        sums = UnitSums(self.counts, self.totals, self.products)
        live = check_live(live_units(sums.counts, sums.totals, sums.products.diagonal()))
        return float(distinct_functions(correlation(sums)[live][:, live]))
