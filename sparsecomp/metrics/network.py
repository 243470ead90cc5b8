"""The structure of a network, as the metrics see it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.connectivity.steps import WeightUse
from sparsecomp.functions import TargetFunction
from sparsecomp.metrics.functional.ground_truth import Subtrees
from sparsecomp.metrics.functional.supports import constituent_arity, hidden_spaces, unit_depths, unit_supports
from sparsecomp.metrics.functional.undefined import UndefinedError


class Part(Enum):
    """What a metric looks at beside weights and masks."""

    ACTIVATIONS = "activations"
    CONNECTIVITY = "connectivity"
    OUTPUTS = "outputs and targets"
    GROUND_TRUTH = "ground truth"


@dataclass(frozen=True, eq=False)
class NetworkStructure:
    """What does not change from batch to batch. Hidden units are the inputs of weights that are not network inputs.

    Attributes:
        weights: Parameter name to the weight of a Linear or convolution whose inputs are recorded.
        masks: Parameter name to bool tensor, True = kept, of all that counts in the sparsity.
        graph: Which parameter feeds which unit; None if not known.
        untraced: Why the graph is not known.
        function: The target function, with its true graph; None if not known.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    >>> weights = {name: p.detach() for name, p in net.named_parameters() if p.dim() == 2}
    >>> NetworkStructure(weights, {}, ConnectivityGraph.trace(net)).hidden
    ('1.weight',)
    """

    weights: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    graph: ConnectivityGraph | None = None
    untraced: str = "no connectivity graph was given."
    function: TargetFunction | None = None

    @property
    def traced(self) -> ConnectivityGraph:
        """The graph.

        Raises:
            UndefinedError: If it is not known.
        """
        if self.graph is None:
            raise UndefinedError(f"the network's connectivity is not known: {self.untraced}")
        return self.graph

    @cached_property
    def hidden(self) -> tuple[str, ...]:
        """Of each set of hidden units the first weight that reads it, in the order of the forward pass.

        Raises:
            UndefinedError: If the graph is not known, or the readers of a set are no Linear or convolution.
        """
        readers = []
        for space in hidden_spaces(self.traced):
            found = [use.name for use in self._uses if use.source == space and use.name in self.weights]
            if not found:
                names = {use.name for use in self._uses if use.source == space}
                raise UndefinedError(
                    f"hidden units are read by {', '.join(names)}, no weight of a Linear or Conv1d-3d."
                )
            readers.append(found[0])
        return tuple(readers)

    @cached_property
    def supports(self) -> Tensor:
        """(units, inputs) bool: the inputs that each hidden unit depends on, in the order of `hidden`; see `unit_supports`.

        Raises:
            UndefinedError: As `hidden`.
        """
        supports = unit_supports(self.traced, self.masks)
        parts = [supports[space] for space in hidden_spaces(self.traced)]
        return torch.cat(parts) if parts else torch.zeros(0, 0, dtype=torch.bool)

    @cached_property
    def layers(self) -> Tensor:
        """(units,) the number of weights on the longest way from an input to each hidden unit, 1 in the first layer."""
        depths = unit_depths(self.traced)
        parts = [torch.full((self.traced.sizes[space],), depths[space]) for space in hidden_spaces(self.traced)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    @cached_property
    def arity(self) -> Tensor:
        """(units,) number of inputs that each hidden unit on a path to an output depends on; see `constituent_arity`.

        Raises:
            UndefinedError: If the graph is not known, or there is no such unit.
        """
        arity = constituent_arity(self.traced, self.masks)
        if not len(arity):
            raise UndefinedError("no hidden unit lies on a path from an input to an output.")
        return arity

    @cached_property
    def nodes(self) -> Subtrees:
        """The internal nodes of the target function, without the outputs.

        Raises:
            UndefinedError: If there is no target function, or all of its nodes are outputs.
        """
        if self.function is None:
            raise UndefinedError("there is no ground truth: no target function was given.")
        return Subtrees.of(self.function)

    @cached_property
    def leaves(self) -> Tensor:
        """(nodes, inputs) bool: the inputs of the network that each node of `nodes` depends on.

        Raises:
            UndefinedError: As `nodes`, or if the network does not read the inputs of the function.
        """
        leaves = self.nodes.leaves
        if leaves.shape[1] != self.supports.shape[1]:
            raise UndefinedError(
                f"the target function has {leaves.shape[1]} inputs and the network {self.supports.shape[1]}."
            )
        return leaves

    @property
    def _uses(self) -> list[WeightUse]:
        return [step for step in self.traced.steps if isinstance(step, WeightUse)]
