"""Pruning for PyTorch Lightning with masks that never lie, and compositionality metrics."""

__version__ = "0.1.0"

from sparsecomp.allocation.base import Allocation
from sparsecomp.allocation.erk import ERK
from sparsecomp.allocation.global_ import Global
from sparsecomp.allocation.layerwise import Layerwise
from sparsecomp.callbacks.base import PruningBase, PruningEvent
from sparsecomp.callbacks.compositionality import CompositionalityMonitor
from sparsecomp.callbacks.fixed_masks import FixedMasks
from sparsecomp.callbacks.hierarchical_similarity_pruning import HierarchicalSimilarityPruning
from sparsecomp.callbacks.lottery_ticket_pruning import LotteryTicketPruning
from sparsecomp.callbacks.magnitude_pruning import MagnitudePruning
from sparsecomp.callbacks.pruning import Pruning
from sparsecomp.callbacks.similarity_pruning import SimilarityPruning
from sparsecomp.criteria.base import Criterion, Need, ScoreContext
from sparsecomp.criteria.fisher import Fisher
from sparsecomp.criteria.magnitude import Magnitude
from sparsecomp.criteria.random import Random
from sparsecomp.criteria.similarity import Similarity
from sparsecomp.criteria.taylor import Taylor
from sparsecomp.criteria.weight_times_input import WeightTimesInput
from sparsecomp.masks import MaskStore
from sparsecomp.one_shot import prune
from sparsecomp.probe import Probe
from sparsecomp.rewinding import Rewind
from sparsecomp.schedules.base import Schedule
from sparsecomp.schedules.cosine import Cosine
from sparsecomp.schedules.geometric import Geometric
from sparsecomp.schedules.levels import Levels
from sparsecomp.schedules.linear import Linear
from sparsecomp.schedules.one_shot import OneShot
from sparsecomp.schedules.polynomial import Polynomial
from sparsecomp.selection import Selection
from sparsecomp.tickets import load_ticket, save_ticket

__all__ = [
    "ERK",
    "Allocation",
    "CompositionalityMonitor",
    "Cosine",
    "Criterion",
    "Fisher",
    "FixedMasks",
    "Geometric",
    "Global",
    "HierarchicalSimilarityPruning",
    "Layerwise",
    "Levels",
    "Linear",
    "LotteryTicketPruning",
    "Magnitude",
    "MagnitudePruning",
    "MaskStore",
    "Need",
    "OneShot",
    "Polynomial",
    "Probe",
    "Pruning",
    "PruningBase",
    "PruningEvent",
    "Random",
    "Rewind",
    "Schedule",
    "ScoreContext",
    "Selection",
    "Similarity",
    "SimilarityPruning",
    "Taylor",
    "WeightTimesInput",
    "load_ticket",
    "prune",
    "save_ticket",
]
