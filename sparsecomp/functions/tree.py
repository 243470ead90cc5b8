"""A balanced binary tree of functions of two inputs."""

import math

import networkx as nx
import torch
from torch import Tensor

from sparsecomp._checks import check_int
from sparsecomp.functions.base import TargetFunction, check_sampling, generators
from sparsecomp.functions.graph import PRODUCT, add_input, add_node, node_value, standardise

_KINDS = ("sin", "gauss", PRODUCT)
_WEIGHTS = (0.5, 0.9)
_BIAS = 1.0
_SAMPLES = 2**17
_MAX_DEPTH = 8


class Tree(TargetFunction):
    """A balanced binary tree over 2 ** depth inputs, each node a function of its two children a and b.

    A node is drawn from sin(w . (a, b) + c), 2 exp(-(w . (a, b) + c)^2) - 1 and a b, and standardised to mean 0 and
    variance 1. Each weight has a random sign and a magnitude uniform in [0.5, 0.9]; c is uniform in [-1, 1]. Inputs are
    uniform in [-sqrt(3), sqrt(3)], so that they too have variance 1. Means and scales come from 131,072 fixed samples.

    Nodes are `h{level}_{place}`: with depth 3, `h1_0` ... `h1_3` read two inputs each, `h2_0` the first two of these,
    `h2_1` the other two, and `h3_0` is the output. Where two products follow each other the grouping of their inputs is
    not unique, as multiplication is associative.

    Args:
        depth: Levels of nodes, in [1, 8]; there are 2 ** depth - 1 nodes.
        permuted: Whether the tree reads randomly chosen columns of x, instead of the first ones in order.
        distractors: Columns of x that the function does not depend on; the last ones unless permuted.
        seed: Makes the function. Neither `permuted` nor `distractors` changes its constants, and
            `Tree(permuted=True)(x)` is `Tree()(x[:, tree.leaf_columns])`.

    Attributes:
        leaf_columns: The column of x that each leaf reads, in the order of the tree.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If a number is no integer, or `permuted` no bool.

    Reference:
        Compositional target functions on binary trees: T. Poggio et al.: Why and When Can Deep -- but Not Shallow --
        Networks Avoid the Curse of Dimensionality, arXiv 1611.00740. The constituents are ours.

    >>> tree = Tree(seed=1)
    >>> tree.in_features, tree.node_names
    (8, ('h1_0', 'h1_1', 'h1_2', 'h1_3', 'h2_0', 'h2_1', 'h3_0'))
    >>> sorted(tree.graph.nodes["h2_1"]["leaves"])
    ['x4', 'x5', 'x6', 'x7']
    >>> x = tree.sample_inputs(5, torch.Generator().manual_seed(0))
    >>> tree(x).shape, tree.node_values(x).shape
    (torch.Size([5, 1]), torch.Size([5, 7]))
    """

    def __init__(self, depth: int = 3, permuted: bool = False, distractors: int = 0, seed: int = 0) -> None:
        self.depth = check_int("depth", depth, "the number of levels", minimum=1)
        if depth > _MAX_DEPTH:
            raise ValueError(f"`depth` is the number of levels and must be in [1, {_MAX_DEPTH}]; got {depth}.")
        if not isinstance(permuted, bool):
            raise TypeError(
                f"`permuted` is whether the tree reads random columns and must be True or False; got {permuted!r}."
            )
        self.permuted = permuted
        self.distractors = check_int("distractors", distractors, "the number of columns without effect")
        self.seed = check_int("seed", seed, "what makes the function")
        self._drawing, self._sampling, shuffling = generators(seed, 3)
        columns = 2**depth + distractors
        order = torch.randperm(columns, generator=shuffling) if permuted else torch.arange(columns)
        self.leaf_columns = tuple(order[: 2**depth].tolist())
        graph = nx.DiGraph()
        for column in range(columns):
            add_input(graph, f"x{column}")
        self._grow(graph, depth, 0)
        super().__init__(graph, (f"h{depth}_0",))

    def sample_inputs(self, n: int, generator: torch.Generator) -> Tensor:
        """Independent and uniform in [-sqrt(3), sqrt(3)]: (n, in_features), float32."""
        return _uniform(torch.rand(check_sampling(n, generator), self.in_features, generator=generator))

    def __repr__(self) -> str:
        return f"Tree(depth={self.depth}, permuted={self.permuted}, distractors={self.distractors}, seed={self.seed})"

    def _grow(self, graph: nx.DiGraph, level: int, place: int) -> tuple[str, Tensor]:
        """Add the subtree below a place and return the name and a sample of its top; only one path is in memory."""
        if level == 0:
            leaf = torch.rand(_SAMPLES, generator=self._sampling, dtype=torch.float64)
            return f"x{self.leaf_columns[place]}", _uniform(leaf)
        children = [self._grow(graph, level - 1, 2 * place + side) for side in (0, 1)]
        name, parents = f"h{level}_{place}", [child for child, _ in children]
        kind = _KINDS[int(torch.randint(len(_KINDS), (), generator=self._drawing))]
        size, sign, bias = torch.rand(3, 2, generator=self._drawing, dtype=torch.float64)
        weights = torch.where(sign < 0.5, -1, 1) * (_WEIGHTS[0] + (_WEIGHTS[1] - _WEIGHTS[0]) * size)
        if kind == PRODUCT:
            add_node(graph, name, kind, parents)
        else:
            add_node(graph, name, kind, parents, weights.tolist(), _BIAS * (2 * float(bias[0]) - 1))
        return name, standardise(graph, name, node_value(graph, name, [values for _, values in children]))


def _uniform(unit: Tensor) -> Tensor:
    return (2 * unit - 1) * math.sqrt(3)
