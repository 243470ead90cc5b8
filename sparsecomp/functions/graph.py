"""The graph of a target function: how nodes are added, and what one of them computes."""

import functools
import operator
from collections.abc import Sequence

import networkx as nx
from torch import Tensor

from sparsecomp._checks import check_choice
from sparsecomp.functions.primitives import PRIMITIVES

INPUT = "input"
PRODUCT = "product"
KINDS = (*PRIMITIVES, PRODUCT)

# Sums over samples end in other last digits with other numbers of threads; a function must not depend on those.
_DIGITS = 9


def add_input(graph: nx.DiGraph, name: str) -> None:
    """Add an input; the first one added is column 0 of x, the next one column 1.

    Attributes: kind "input", level 0, index (its column), leaves (itself).
    """
    _check_new(graph, name)
    index = sum(kind == INPUT for _, kind in graph.nodes(data="kind"))
    graph.add_node(name, kind=INPUT, level=0, index=index, leaves=frozenset({name}))


def add_node(
    graph: nx.DiGraph, name: str, kind: str, parents: Sequence[str], weights: Sequence[float] = (), bias: float = 0.0
) -> None:
    """Add an internal node with an edge from each of its parents, not yet standardised.

    Attributes: kind, parents, weights and bias as given; mean 0 and scale 1, see `node_value`; level, one more than the
    highest of its parents; leaves, the names of the inputs it depends on.

    Raises:
        ValueError: If the name is taken, the kind or a parent is unknown, or there is not one weight for each parent
            (none for a product).

    >>> graph = nx.DiGraph()
    >>> for name in ("a", "b", "c"):
    ...     add_input(graph, name)
    >>> add_node(graph, "h", "sin", ("a", "c"), (0.5, -0.5))
    >>> sorted(graph.nodes["h"]["leaves"]), graph.nodes["h"]["level"], list(graph.edges)
    (['a', 'c'], 1, [('a', 'h'), ('c', 'h')])
    """
    _check_new(graph, name)
    check_choice("kind", kind, f"what node {name!r} computes", KINDS)
    unknown = [parent for parent in parents if parent not in graph]
    if not parents or unknown or len(set(parents)) < len(parents):
        raise ValueError(
            f"`parents` of {name!r} must be different nodes of the graph, at least one; got {list(parents)}. Add them first."
        )
    expected = 0 if kind == PRODUCT else len(parents)
    if len(weights) != expected:
        raise ValueError(f"`weights` of {name!r} has one number a parent, here {expected}; got {list(weights)}.")
    leaves = frozenset[str]().union(*(graph.nodes[parent]["leaves"] for parent in parents))
    level = 1 + max(graph.nodes[parent]["level"] for parent in parents)
    constants = {"weights": tuple(weights), "bias": bias, "mean": 0.0, "scale": 1.0}
    graph.add_node(name, kind=kind, parents=tuple(parents), level=level, leaves=leaves, **constants)
    graph.add_edges_from((parent, name) for parent in parents)


def node_value(graph: nx.DiGraph, name: str, parents: Sequence[Tensor]) -> Tensor:
    """What an internal node makes of the values of its parents, in their order.

    (f(w . p + bias) - mean) / scale with f the primitive of its kind; for a product (p_1 p_2 ... - mean) / scale.

    >>> import torch
    >>> graph = nx.DiGraph()
    >>> add_input(graph, "a")
    >>> add_input(graph, "b")
    >>> add_node(graph, "h", "product", ("a", "b"))
    >>> node_value(graph, "h", [torch.tensor([2.0]), torch.tensor([3.0])])
    tensor([6.])
    """
    node = graph.nodes[name]
    if node["kind"] == PRODUCT:
        raw = functools.reduce(operator.mul, parents)
    else:
        terms = [weight * parent for weight, parent in zip(node["weights"], parents, strict=True)]
        raw = PRIMITIVES[node["kind"]](functools.reduce(operator.add, terms) + node["bias"])
    value: Tensor = (raw - node["mean"]) / node["scale"]
    return value


def standardise(graph: nx.DiGraph, name: str, values: Tensor, centred: bool = True) -> Tensor:
    """Fix the mean and the scale of a node from a sample of its raw values, and return the standardised ones.

    Args:
        graph: Has the node; its attributes `mean` and `scale` change.
        name: A node with mean 0 and scale 1.
        values: Its values on the sample, (n,).
        centred: Whether the mean is taken off too, and not only the standard deviation divided by.
    """
    node = graph.nodes[name]
    node["mean"] = round(float(values.mean()), _DIGITS) if centred else 0.0
    node["scale"] = round(float(values.std(correction=0)), _DIGITS)
    standardised: Tensor = (values - node["mean"]) / node["scale"]
    return standardised


def _check_new(graph: nx.DiGraph, name: str) -> None:
    if name in graph:
        raise ValueError(f"`name` is that of a new node and must not be taken; got {name!r}.")
