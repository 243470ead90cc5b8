"""Which inputs of the network each unit depends on through the masks."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.connectivity.steps import Link, Step, WeightUse


def unit_supports(graph: ConnectivityGraph, masks: Mapping[str, Tensor]) -> list[Tensor]:
    """The inputs that each unit depends on: u is in the support of v if a path of kept connections leads from u to v.

    Input spaces of one size are the same inputs, unit by unit: a skip connection reads what the first layer reads. Of
    pictures an input is a channel. Memory is units x inputs bytes.

    Args:
        graph: The network's connectivity.
        masks: Parameter name to bool tensor, True = kept; weights without one count as kept.

    Returns:
        For each space of the graph (units, inputs) bool, on the CPU.

    Raises:
        TypeError, ValueError: If a mask is not bool or does not fit the graph.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    >>> masks = {"0.weight": torch.tensor([[True, True, False], [False, False, True]])}
    >>> unit_supports(ConnectivityGraph.trace(net), masks)[1].tolist()
    [[True, True, False], [False, False, True]]
    """
    graph.check_masks("masks", masks)
    sources = {space: list(range(graph.sizes[space])) for space in graph.inputs}
    for space, unit in graph.input_units:
        sources.setdefault(space, []).append(unit)
    sizes = list(dict.fromkeys(graph.sizes[space] for space in sources))
    first = {size: sum(sizes[:index]) for index, size in enumerate(sizes)}
    supports = [torch.zeros(size, sum(sizes), dtype=torch.bool) for size in graph.sizes]
    for space, units in sources.items():
        for unit in units:
            supports[space][unit, first[graph.sizes[space]] + unit] = True
    for step in graph.steps:
        supports[step.target] |= _arriving(step, supports[step.source], len(supports[step.target]), masks)
    return supports


def unit_depths(graph: ConnectivityGraph) -> list[int]:
    """For each space the largest number of weights on a way to it from an input: 1 for the first hidden layer."""
    depths = [0] * len(graph.sizes)
    for step in graph.steps:
        depths[step.target] = max(depths[step.target], depths[step.source] + isinstance(step, WeightUse))
    return depths


def reaching_outputs(graph: ConnectivityGraph, masks: Mapping[str, Tensor]) -> list[Tensor]:
    """For each space (units,) bool: whether a path of kept connections leads on to an output. Arguments as above."""
    reaching = [torch.zeros(size, dtype=torch.bool) for size in graph.sizes]
    for space in graph.outputs:
        reaching[space][:] = True
    for step in reversed(graph.steps):
        source, target = reaching[step.source], reaching[step.target]
        if isinstance(step, Link):
            source[step.source_units[target[step.target_units]]] = True
        elif isinstance(step, WeightUse):
            rows = target.reshape(step.groups, 1, -1).float()
            source |= (rows @ _connections(step, masks) > 0).flatten()
        else:
            groups = target.reshape(step.groups, -1).any(1)
            source |= groups.repeat_interleave(len(source) // step.groups)
    return reaching


def constituent_arity(graph: ConnectivityGraph, masks: Mapping[str, Tensor]) -> Tensor:
    """How many of the network's inputs each hidden unit depends on, through the masks.

    Counted are the units that a weight reads, that depend on an input and that an output depends on: a tree of two-input
    constituents has 2 in its first layer and 4 in its second one.

    Args:
        graph: The network's connectivity.
        masks: As for `unit_supports`.

    Returns:
        (units,) int64, >= 1; empty where no hidden unit lies on a path from an input to an output.

    Raises:
        TypeError, ValueError: As `unit_supports`.

    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    >>> masks = {"0.weight": torch.tensor([[True, True, False], [False, False, True]])}
    >>> constituent_arity(ConnectivityGraph.trace(net), masks).tolist()
    [2, 1]
    """
    supports, reaching = unit_supports(graph, masks), reaching_outputs(graph, masks)
    hidden = [supports[space].sum(1)[reaching[space]] for space in hidden_spaces(graph)]
    arity = torch.cat(hidden) if hidden else torch.zeros(0, dtype=torch.int64)
    return arity[arity > 0]


def hidden_spaces(graph: ConnectivityGraph) -> list[int]:
    """Spaces of hidden units: those that a weight reads and a weight wrote, in order of their first reader."""
    depths = unit_depths(graph)
    read = dict.fromkeys(step.source for step in graph.steps if isinstance(step, WeightUse))
    return [space for space in read if depths[space] > 0]


def _arriving(step: Step, source: Tensor, size: int, masks: Mapping[str, Tensor]) -> Tensor:
    """What of (source units, inputs) comes to each of `size` target units."""
    if isinstance(step, Link):
        arriving = source.new_zeros(size, source.shape[1])
        arriving[step.target_units] = source[step.source_units]
        return arriving
    if isinstance(step, WeightUse):
        units = source.reshape(step.groups, -1, source.shape[1]).float()
        return (_connections(step, masks) @ units > 0).flatten(0, 1)
    mixed = source.reshape(step.groups, -1, source.shape[1]).any(1)
    return mixed.repeat_interleave(size // step.groups, dim=0)


def _connections(use: WeightUse, masks: Mapping[str, Tensor]) -> Tensor:
    """(groups, target units, source units): 1 where any tap is kept."""
    mask = masks.get(use.name)
    kept = torch.ones(use.shape, dtype=torch.bool) if mask is None else mask.cpu()
    matrix = kept.reshape(*use.shape[:2], -1).any(2).float().reshape(use.groups, -1, use.shape[1])
    return matrix.transpose(1, 2) if use.transposed else matrix
