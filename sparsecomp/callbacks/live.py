"""The connectivity graph of a LightningModule, or why there is none."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import lightning as L
import torch
from torch import Tensor

from sparsecomp.connectivity import ConnectivityGraph, UntraceableError, effective_sparsity
from sparsecomp.probe import Probe, like_module


@dataclass(frozen=True)
class LiveConnections:
    """What of a network lies on a path from an input to an output.

    Attributes:
        graph: The connectivity graph, None where it cannot be traced.
        reason: Why it cannot.
    """

    graph: ConnectivityGraph | None
    reason: str = ""

    @classmethod
    def of(cls, trainer: L.Trainer, pl_module: L.LightningModule, probe: Probe) -> "LiveConnections":
        """Trace the module's `forward`; where that needs shapes, on a training batch."""
        try:
            return cls(ConnectivityGraph.trace(pl_module))
        except UntraceableError as error:
            reason = str(error)
        loader = trainer.train_dataloader
        if loader is None:
            return cls(None, reason)
        try:
            with torch.random.fork_rng(devices=[]):
                batch = next(iter(copy.copy(loader)))
            return cls(ConnectivityGraph.trace(pl_module, probe.inputs(like_module(batch, pl_module))))
        except (UntraceableError, TypeError) as error:
            return cls(None, str(error))

    def required(self) -> ConnectivityGraph:
        """The graph.

        Raises:
            ValueError: If the network cannot be traced.
        """
        if self.graph is None:
            raise ValueError(
                f"`target`='effective' counts live connections, and this network's are not known: {self.reason} Use "
                "target='nominal'."
            )
        return self.graph

    def sparsity(self, masks: Mapping[str, Tensor]) -> float:
        """Effective sparsity: the fraction of the selected weights that is not live; NaN where it is not known."""
        return math.nan if self.graph is None else effective_sparsity(self.graph, masks)
