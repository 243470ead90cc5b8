"""A picture from a layered graph of CPPN primitives."""

import networkx as nx
import torch
from torch import Tensor

from sparsecomp._checks import check_int, check_number
from sparsecomp.functions.base import TargetFunction, check_sampling, generators
from sparsecomp.functions.coordinates import INPUT_NAMES, coordinate_inputs, pixel_grid
from sparsecomp.functions.graph import add_input, add_node, node_value, standardise
from sparsecomp.functions.primitives import PRIMITIVES

_KINDS = tuple(sorted(PRIMITIVES))
_WEIGHTS = (0.5, 2.5)
_SAMPLES = 2**16


class Pattern(TargetFunction):
    """A picture: at each place (x, y) the value of a layered graph of CPPN primitives.

    Inputs are x, y, d = 1.4 sqrt(x^2 + y^2) and bias = 1. A node is f(w . p) / scale, with f drawn from sin, cos, tanh,
    gauss = 2 exp(-z^2) - 1 and identity, and p two different nodes of the level below. Each weight has a random sign and a
    magnitude uniform in [0.5, 2.5]. The scale, from 65,536 fixed samples, gives unit variance; means stay, so that a
    network without biases can realise the graph: a scale goes into the weights above it, a mean could not. Levels
    1 ... depth - 1 are drawn with `width` nodes each, level `depth` with one for each output. Drawn anew are nodes that are
    nearly constant or nearly equal to a sibling, that is one of the same level, up to a sign and an affine map. Nodes
    that no output depends on are left out in the end.

    Nodes are `h{level}_{place}`, and those of the last level are the outputs.

    Args:
        depth: Levels of nodes, >= 1.
        width: Nodes drawn for each level below the outputs, >= 2.
        out_features: Outputs, >= 1: 1 for grey, 3 for colour.
        min_std: The smallest standard deviation of a node before scaling, in [0, 1); with less it is nearly constant.
            Primitives other than the identity have values in [-1, 1].
        max_correlation: The largest |correlation| of siblings, in (0, 1]; with more they are nearly equal.
        max_tries: Draws of one node before giving up, >= 1.
        seed: Makes the function.

    Raises:
        ValueError: If a number is out of its range, or `max_tries` draws gave no node that differs from its siblings.
        TypeError: If a number has the wrong type.

    Reference:
        K. O. Stanley: Compositional pattern producing networks, Genetic Programming and Evolvable Machines 8, 2007. The
        layered graph, the weights and the scales are ours.

    >>> pattern = Pattern(depth=2, seed=0)
    >>> pattern.input_names, pattern.output_names
    (('x', 'y', 'd', 'bias'), ('h2_0',))
    >>> pattern.image(64).shape
    torch.Size([64, 64, 1])
    """

    def __init__(
        self,
        depth: int = 3,
        width: int = 4,
        out_features: int = 1,
        min_std: float = 0.2,
        max_correlation: float = 0.95,
        max_tries: int = 100,
        seed: int = 0,
    ) -> None:
        self.depth = check_int("depth", depth, "the number of levels", minimum=1)
        self.width = check_int("width", width, "the number of nodes drawn for a level", minimum=2)
        check_int("out_features", out_features, "the number of outputs", minimum=1)
        self.min_std = check_number("min_std", min_std, "the smallest standard deviation of a node", "in [0, 1)")
        if not 0.0 <= min_std < 1.0:
            raise ValueError(
                f"`min_std` is the smallest standard deviation of a node and must be in [0, 1); got {min_std!r}."
            )
        meaning = "the largest |correlation| of nodes of a level"
        self.max_correlation = check_number("max_correlation", max_correlation, meaning, "in (0, 1]")
        if not 0.0 < max_correlation <= 1.0:
            raise ValueError(f"`max_correlation` is {meaning} and must be in (0, 1]; got {max_correlation!r}.")
        self.max_tries = check_int("max_tries", max_tries, "the number of draws of one node", minimum=1)
        self.seed = check_int("seed", seed, "what makes the function")
        self._drawing, sampling = generators(seed, 2)
        graph = nx.DiGraph()
        for name in INPUT_NAMES:
            add_input(graph, name)
        below = dict(zip(INPUT_NAMES, _places(_SAMPLES, sampling, torch.float64).unbind(dim=1), strict=True))
        for level in range(1, depth + 1):
            nodes: dict[str, Tensor] = {}
            for place in range(out_features if level == depth else width):
                name = f"h{level}_{place}"
                nodes[name] = self._draw(graph, name, below, nodes)
            below = nodes
        needed = set(below).union(INPUT_NAMES, *(nx.ancestors(graph, output) for output in below))
        graph.remove_nodes_from(set(graph) - needed)
        super().__init__(graph, tuple(below))

    def sample_inputs(self, n: int, generator: torch.Generator) -> Tensor:
        """Places that are uniform in the square [-1, 1]^2, as x, y, d and bias: (n, 4), float32."""
        return _places(check_sampling(n, generator), generator, torch.float32)

    def image(self, resolution: int = 64) -> Tensor:
        """The picture on `resolution` x `resolution` pixels: (resolution, resolution, out_features), not in [0, 1]."""
        return self(pixel_grid(resolution, resolution)).view(resolution, resolution, self.out_features)

    def __repr__(self) -> str:
        return (
            f"Pattern(depth={self.depth}, width={self.width}, out_features={self.out_features}, min_std={self.min_std}, "
            f"max_correlation={self.max_correlation}, max_tries={self.max_tries}, seed={self.seed})"
        )

    def _draw(self, graph: nx.DiGraph, name: str, below: dict[str, Tensor], siblings: dict[str, Tensor]) -> Tensor:
        """Add a node that is neither nearly constant nor nearly a sibling, and return a sample of it."""
        for _ in range(self.max_tries):
            kind = _KINDS[int(torch.randint(len(_KINDS), (), generator=self._drawing))]
            chosen = torch.randperm(len(below), generator=self._drawing)[:2].tolist()
            parents = [list(below)[index] for index in chosen]
            size, sign = torch.rand(2, 2, generator=self._drawing, dtype=torch.float64)
            weights = torch.where(sign < 0.5, -1, 1) * (_WEIGHTS[0] + (_WEIGHTS[1] - _WEIGHTS[0]) * size)
            add_node(graph, name, kind, parents, weights.tolist())
            raw = node_value(graph, name, [below[parent] for parent in parents])
            if raw.std() > max(self.min_std, 1e-6) and all(
                abs(_correlation(raw, sibling)) <= self.max_correlation for sibling in siblings.values()
            ):
                return standardise(graph, name, raw, centred=False)
            graph.remove_node(name)
        raise ValueError(
            f"`max_tries` is the number of draws of one node, and {self.max_tries} gave no {name!r} with a standard deviation "
            f"above `min_std`={self.min_std:g} and |correlation| <= `max_correlation`={self.max_correlation:g} to the "
            f"{len(siblings)} nodes beside it. Lower `width` or `min_std`, raise `max_correlation` or `max_tries`, or take "
            f"another `seed` than {self.seed}."
        )


def _places(n: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    x, y = (2 * torch.rand(n, 2, generator=generator, dtype=dtype) - 1).unbind(dim=1)
    return coordinate_inputs(x, y)


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])
