"""The graph of unit spaces and weights."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparsecomp.connectivity.steps import Link, Mixing, Step, WeightUse

if TYPE_CHECKING:
    from sparsecomp.connectivity.declaring import Feed


class UntraceableError(ValueError):
    """The connectivity of a network could not be read from its forward pass; the message says where and why."""


@dataclass(frozen=True)
class ConnectivityGraph:
    """Which parameter feeds which unit.

    Nodes are unit spaces (the channels or features of one value of the forward pass), and steps lead from one space
    to the next: weights (a connection is there if any of its taps is kept), links unit by unit (residual additions,
    concatenation, flattening), and mixings (LayerNorm, softmax over units). Build it with `trace` or `declare`.

    Attributes:
        sizes: Number of units of each space.
        steps: In topological order.
        inputs: Spaces whose units are inputs of the network.
        outputs: Spaces whose units are outputs.
        input_units: Further units that are inputs, as (space, unit).
        unitwise: Names of parameters that connect no units with each other: biases, scales, offsets.
        unused: Names of weights that the forward pass does not use; they lie on no path.

    >>> graph = ConnectivityGraph.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> graph.weights
    ('0.weight', '2.weight')
    """

    sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_units: tuple[tuple[int, int], ...] = ()
    unitwise: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()

    @classmethod
    def trace(cls, module: nn.Module, example_inputs: Any = None, submodule: str = "") -> "ConnectivityGraph":
        """Read the graph from the forward pass, which is traced symbolically with torch.fx and never run for real.

        Args:
            module: The network; parameter names are those of `module.named_parameters()`.
            example_inputs: A batch that `forward` takes, or a tuple of its positional arguments. Only the shapes
                matter. Needed where a view, a mean or an index can be understood only with them; flattening between a
                convolution and a Linear is understood without.
            submodule: Name of the part of `module` to trace, such as "network" where the forward pass of a
                LightningModule does more than calling it. Names stay those of `module`.

        Raises:
            UntraceableError: If the forward pass branches on data, or an operation moves units in a way that is not
                understood; the message names the node, the operation and what to do.

        >>> net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2))
        >>> ConnectivityGraph.trace(net).weights
        ('0.weight', '4.weight')
        """
        from sparsecomp.connectivity.tracing import trace

        return trace(module, example_inputs, submodule)

    @classmethod
    def declare(
        cls,
        module: nn.Module,
        feeds: "Iterable[tuple[str, str] | Feed]",
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
    ) -> "ConnectivityGraph":
        """Say by hand which weight feeds which, for a network that cannot be traced.

        Args:
            module: The network, which knows shapes and groups of the weights.
            feeds: Pairs (source, target) of parameter names: the output units of the source are input units of the
                target; or `Feed`s, which also say at which offset and how many positions a unit spans. Several
                sources at the same place are added up. Source units span target units // source units positions,
                channel by channel, where a pair does not say.
            inputs: Weights that read the network's inputs beside what feeds them; input units that nothing feeds are
                inputs anyhow.
            outputs: Weights that write outputs beside feeding others; weights that feed nothing write outputs anyhow.

        Raises:
            ValueError: If a name is no weight of the module, sizes do not fit, or the weights feed each other in a
                circle.

        >>> net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> ConnectivityGraph.declare(net, [("0.weight", "2.weight")]).weights
        ('0.weight', '2.weight')
        """
        from sparsecomp.connectivity.declaring import declare

        return declare(module, feeds, inputs, outputs)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the weights in order of first use; a tied one once."""
        return tuple(self.uses)

    @property
    def uses(self) -> dict[str, list[WeightUse]]:
        """Name of a weight -> its uses, several where it is shared."""
        uses: dict[str, list[WeightUse]] = {}
        for step in self.steps:
            if isinstance(step, WeightUse):
                uses.setdefault(step.name, []).append(step)
        return uses

    def check_names(self, argument: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Refuse names that the graph does not know and shapes that are not the weight's."""
        uses = self.uses
        for name, tensor in tensors.items():
            if name in uses and tuple(tensor.shape) != uses[name][0].shape:
                raise ValueError(
                    f"`{argument}[{name!r}]` must have the shape of the weight, {uses[name][0].shape}; got "
                    f"{tuple(tensor.shape)}."
                )
            if name not in uses and name not in self.unitwise and name not in self.unused:
                raise ValueError(
                    f"`{argument}` maps names of the traced network's parameters to tensors, and {name!r} is none; the "
                    f"weights are {', '.join(uses)}. Trace the module that the names belong to."
                )

    def check_masks(self, argument: str, masks: Mapping[str, torch.Tensor]) -> None:
        """As `check_names`, and refuse what is not bool."""
        self.check_names(argument, masks)
        for name, mask in masks.items():
            if mask.dtype is not torch.bool:
                raise TypeError(f"`{argument}[{name!r}]` must be a bool tensor, True = kept; got dtype {mask.dtype}.")


@dataclass
class GraphBuilder:
    """Collects spaces and steps in topological order."""

    sizes: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def space(self, size: int, *, is_input: bool = False) -> int:
        """A new set of `size` units."""
        self.sizes.append(size)
        if is_input:
            self.inputs.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def link(
        self, source: int, target: int, source_units: torch.Tensor | None = None, offset: int | torch.Tensor = 0
    ) -> None:
        """Source units (all if None) are the target units from `offset` on, or the given ones."""
        units = torch.arange(self.sizes[source]) if source_units is None else source_units
        places = torch.arange(len(units)) + offset if isinstance(offset, int) else offset
        self.steps.append(Link(source, target, units, places))

    def mix(self, source: int, size: int, groups: int = 1) -> int:
        """A new space of `size` units, each of which depends on all source units of its group."""
        target = self.space(size)
        self.steps.append(Mixing(source, target, groups))
        return target

    def build(self, **rest: Any) -> ConnectivityGraph:
        """The finished graph."""
        return ConnectivityGraph(
            tuple(self.sizes), tuple(self.steps), tuple(self.inputs), tuple(dict.fromkeys(self.outputs)), **rest
        )
