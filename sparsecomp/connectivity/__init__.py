"""Which parameter feeds which unit, what lies on a path from an input to an output, and selecting by that."""

from sparsecomp.connectivity.allocating import allocate_effective
from sparsecomp.connectivity.declaring import Feed
from sparsecomp.connectivity.graph import ConnectivityGraph, UntraceableError
from sparsecomp.connectivity.reachability import effective_sparsity, live_connections

__all__ = [
    "ConnectivityGraph",
    "Feed",
    "UntraceableError",
    "allocate_effective",
    "effective_sparsity",
    "live_connections",
]
