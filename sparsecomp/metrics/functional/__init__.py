"""The mathematics of the metrics, as pure functions."""

from sparsecomp.connectivity import effective_sparsity
from sparsecomp.metrics.functional.alignment import node_alignment
from sparsecomp.metrics.functional.decodability import decodability
from sparsecomp.metrics.functional.distinct import distinct_functions
from sparsecomp.metrics.functional.fan_in import effective_fan_in
from sparsecomp.metrics.functional.fvu import fvu
from sparsecomp.metrics.functional.purity import pure_units, purity
from sparsecomp.metrics.functional.selectivity import selectivity, selectivity_gain
from sparsecomp.metrics.functional.sparsity import sparsity
from sparsecomp.metrics.functional.sums import UnitSums, correlation, live_units, unit_sums
from sparsecomp.metrics.functional.supports import constituent_arity, unit_supports
from sparsecomp.metrics.functional.symmetry import symmetry_purity
from sparsecomp.metrics.functional.undefined import UndefinedError

__all__ = [
    "UndefinedError",
    "UnitSums",
    "constituent_arity",
    "correlation",
    "decodability",
    "distinct_functions",
    "effective_fan_in",
    "effective_sparsity",
    "fvu",
    "live_units",
    "node_alignment",
    "pure_units",
    "purity",
    "selectivity",
    "selectivity_gain",
    "sparsity",
    "symmetry_purity",
    "unit_sums",
    "unit_supports",
]
