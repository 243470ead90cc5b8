"""A function whose inner structure is known: the interface of every target."""

from abc import ABC, abstractmethod

import networkx as nx
import torch
from torch import Tensor

from sparsecomp._checks import check_instance, check_int
from sparsecomp.functions.graph import INPUT, node_value


class TargetFunction(ABC):
    """A function to learn whose graph of constituents is the ground truth.

    `graph` is a networkx.DiGraph from inputs to outputs. Each node has the attributes `kind` ("input", "product" or a
    name in `PRIMITIVES`), `level` (0 for inputs) and `leaves` (a frozenset of the names of the inputs that it depends
    on). Inputs have `index`, their column of x; an input without an edge is a distractor. Internal nodes have `parents`
    (in their order), `weights`, `bias`, `mean` and `scale`, and compute

        (f(w . p + bias) - mean) / scale, for a product (p_1 p_2 - mean) / scale.

    On inputs from `sample_inputs` every internal node has unit variance, up to the sampling error of the fixed sample that
    `scale` comes from. Constants are fixed at construction, from the seed alone: equal arguments make equal functions in
    every run.

    A subclass makes the graph with `add_input` and `add_node`, hands it to this constructor and gives `sample_inputs`.

    Args:
        graph: The graph; it is frozen.
        outputs: Names of the nodes that are the outputs, in order.

    Raises:
        ValueError: If there are no inputs, or an output is none of the internal nodes.
    """

    def __init__(self, graph: nx.DiGraph, outputs: tuple[str, ...]) -> None:
        kinds = dict(graph.nodes(data="kind"))
        self.input_names = tuple(name for name, kind in kinds.items() if kind == INPUT)
        internal = [name for name, kind in kinds.items() if kind != INPUT]
        self.node_names = tuple(sorted(internal, key=lambda name: graph.nodes[name]["level"]))
        self.output_names = tuple(outputs)
        if not self.input_names:
            raise ValueError("`graph` must have a node of kind 'input'; got none. Use add_input.")
        if not outputs or not set(outputs) <= set(internal):
            raise ValueError(
                f"`outputs` names internal nodes, at least one of {sorted(internal)}; got {list(outputs)}."
            )
        self.graph = nx.freeze(graph)

    @property
    def in_features(self) -> int:
        """Number of inputs, those included that the function does not depend on."""
        return len(self.input_names)

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return len(self.output_names)

    def __call__(self, x: Tensor) -> Tensor:
        """The outputs: (n, in_features) -> (n, out_features), in the order of `output_names`.

        Raises:
            ValueError: If x has another shape.
            TypeError: If x has no floating point numbers.
        """
        values = self._values(x)
        return torch.stack([values[name] for name in self.output_names], dim=1)

    def node_values(self, x: Tensor) -> Tensor:
        """Values of the internal nodes, outputs included: (n, in_features) -> (n, nodes), in the order of `node_names`.

        `node_names` goes up level by level, and within a level in the order of the nodes' numbers.

        Raises:
            ValueError: If x has another shape.
            TypeError: If x has no floating point numbers.
        """
        values = self._values(x)
        return torch.stack([values[name] for name in self.node_names], dim=1)

    @abstractmethod
    def sample_inputs(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` inputs from the distribution on which nodes have unit variance: (n, in_features), float32."""

    def _values(self, x: Tensor) -> dict[str, Tensor]:
        if x.ndim != 2 or x.shape[1] != self.in_features:
            raise ValueError(
                f"`x` has the inputs and must be of shape (n, {self.in_features}); got {tuple(x.shape)}. Its columns are "
                f"{', '.join(self.input_names)}."
            )
        if not x.is_floating_point():
            raise TypeError(f"`x` has the inputs and must be floating point; got {x.dtype}. Use x.float().")
        values = dict(zip(self.input_names, x.unbind(dim=1), strict=True))
        for name in self.node_names:
            parents = [values[parent] for parent in self.graph.nodes[name]["parents"]]
            values[name] = node_value(self.graph, name, parents)
        return values


def check_sampling(n: int, generator: torch.Generator) -> int:
    """Return the number of inputs to sample, and refuse any that is no positive integer, and a missing generator."""
    example = "torch.Generator().manual_seed(0)"
    check_instance("generator", generator, "where random numbers come from", torch.Generator, example)
    return check_int("n", n, "the number of inputs to sample", minimum=1)


def generators(seed: int, count: int) -> list[torch.Generator]:
    """`count` generators whose streams are unrelated, each a function of `seed` and its place alone.

    >>> [int(torch.randint(100, (), generator=g)) for g in generators(0, 2)] == [
    ...     int(torch.randint(100, (), generator=g)) for g in generators(0, 2)
    ... ]
    True
    """
    first = torch.Generator().manual_seed(check_int("seed", seed, "the start of the random numbers") % 2**63)
    seeds = [int(torch.randint(2**62, (), generator=first)) for _ in range(count)]
    return [torch.Generator().manual_seed(number) for number in seeds]
