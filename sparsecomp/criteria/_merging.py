"""Merging copies among hidden units before scoring."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sparsecomp.criteria.base import ScoreContext
from sparsecomp.functional.merging import apply_merge, merge_units
from sparsecomp.readers import Readers
from sparsecomp.statistics import LayerStatistics


@dataclass(frozen=True)
class Merged:
    """Weights and biases of readers after merging, and which units of the writers were dropped.

    Attributes:
        weights: By the name of the reader's weight.
        biases: The same.
        dropped: (units,) bool by the name of the writer's weight.
    """

    weights: dict[str, Tensor]
    biases: dict[str, Tensor]
    dropped: dict[str, Tensor]


def merge_readers(
    context: ScoreContext, statistics: Mapping[str, LayerStatistics], readers: Readers, tau: float | None
) -> Merged:
    """Merge units of which one Linear layer with a bias is the only reader; nothing if `tau` is None.

    Units of a residual stream are written or read by several layers and stay: to merge them for one reader alone would
    leave the others with a unit that is gone.
    """
    merged = Merged({}, {}, {})
    if tau is None:
        return merged
    entries = {entry.name: entry for entry in context.selected}
    for writer, reader in readers.only.items():
        layer, bias = statistics[reader], entries[reader].owner.bias
        if len(layer.mean) != len(context.weights[writer]) or not isinstance(bias, Tensor):
            continue  # a flattened picture: columns are not units
        found = merge_units(layer.mean, layer.covariance, tau)
        merged.dropped[writer] = found.dropped
        merged.weights[reader], merged.biases[reader] = apply_merge(found, context.weights[reader], bias.detach())
    return merged
