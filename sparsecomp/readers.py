"""Which layer reads the units that another one writes."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sparsecomp.connectivity import ConnectivityGraph, UntraceableError
from sparsecomp.connectivity.steps import Link, WeightUse
from sparsecomp.selection import PrunableParameter


@dataclass(frozen=True)
class Readers:
    """Selected weights that read the units which other selected weights write.

    Attributes:
        any: Weight name to a weight that reads its units (after activations and norms), so that it shows them.
        only: Weight name to the Linear weight that alone reads its units and has a bias.
    """

    any: dict[str, str]
    only: dict[str, str]


def find_readers(module: nn.Module, selected: Sequence[PrunableParameter]) -> Readers:
    """Look the readers up in the connectivity graph; none are found where the network cannot be traced.

    >>> from sparsecomp.selection import Selection
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_readers(net, Selection().resolve(net)).only
    {'0.weight': '2.weight'}
    """
    try:
        graph = ConnectivityGraph.trace(module)
    except UntraceableError:
        return Readers({}, {})
    entries = {entry.name: entry for entry in selected}
    shown: dict[str, str] = {}
    alone: dict[str, str] = {}
    for name in entries:
        uses = graph.uses.get(name, ())
        if len(uses) != 1:
            continue
        places = passed_on(graph, uses[0].target)
        reading = [s for s in graph.steps if s.source in places and not (isinstance(s, Link) and s.target in places)]
        whole = {space for space, units in places.items() if units == list(range(uses[0].target_size))}
        weights = [
            step
            for step in reading
            if isinstance(step, WeightUse) and step.name in entries and step.source in whole and step.groups == 1
        ]
        if weights:
            shown[name] = weights[0].name
        writing = [step for step in graph.steps if step.target == uses[0].target]
        if len(writing) == len(reading) == len(weights) == 1 and not places.keys() & set(graph.outputs):
            reader = entries[weights[0].name]
            if isinstance(reader.owner, nn.Linear) and reader.bias is not None and len(graph.uses[reader.name]) == 1:
                alone[name] = reader.name
    return Readers(shown, alone)


def passed_on(graph: ConnectivityGraph, space: int) -> dict[int, list[int]]:
    """Spaces that the units of `space` are passed on to one by one: for each of their units the unit it is, or -1."""
    places = {space: list(range(graph.sizes[space]))}
    for step in graph.steps:
        if isinstance(step, Link) and step.source in places:
            units = places.setdefault(step.target, [-1] * graph.sizes[step.target])
            pairs = zip(step.source_units.tolist(), step.target_units.tolist(), strict=True)
            for source, target in pairs:
                units[target] = places[step.source][source]
    # A sum with something else is not the unit itself any more.
    mixed = {s.target for s in graph.steps if s.target in places and s.target != space and s.source not in places}
    return {place: [-1] * len(units) if place in mixed else units for place, units in places.items()}
