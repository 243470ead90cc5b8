"""Pruning callbacks for any LightningModule."""

from sparsecomp.callbacks.base import PruningBase, PruningEvent
from sparsecomp.callbacks.compositionality import CompositionalityMonitor
from sparsecomp.callbacks.fixed_masks import FixedMasks
from sparsecomp.callbacks.hierarchical_similarity_pruning import HierarchicalSimilarityPruning
from sparsecomp.callbacks.lottery_ticket_pruning import LotteryTicketPruning
from sparsecomp.callbacks.magnitude_pruning import MagnitudePruning
from sparsecomp.callbacks.pruning import Pruning
from sparsecomp.callbacks.similarity_pruning import SimilarityPruning

__all__ = [
    "CompositionalityMonitor",
    "FixedMasks",
    "HierarchicalSimilarityPruning",
    "LotteryTicketPruning",
    "MagnitudePruning",
    "Pruning",
    "PruningBase",
    "PruningEvent",
    "SimilarityPruning",
]
