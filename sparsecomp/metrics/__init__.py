"""Metrics of networks. A file of this folder with a metric is all it takes."""

from typing import Any

from sparsecomp._discovery import export_family
from sparsecomp.metrics.base import NetworkMetric as NetworkMetric
from sparsecomp.metrics.batch import NetworkBatch as NetworkBatch
from sparsecomp.metrics.network import NetworkStructure as NetworkStructure
from sparsecomp.metrics.network import Part as Part
from sparsecomp.metrics.watching import watch as watch

MEMBERS = export_family(__name__, NetworkMetric)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no metric {name!r}; there are {', '.join(MEMBERS)}.")
