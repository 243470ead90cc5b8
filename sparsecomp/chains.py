"""Networks that are a chain of fully connected layers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.connectivity.steps import Mixing
from sparsecomp.models.cppn import MixedActivation
from sparsecomp.readers import passed_on
from sparsecomp.selection import PrunableParameter


@dataclass(frozen=True)
class LinearChain:
    """Weights of Linear layers of which each reads the units that the one before writes, and nothing else.

    Attributes:
        names: The weights in order; the last one is that of the readout.
        inputs: Number of inputs of the first.
        outputs: Number of outputs of the last.
        activations: For each hidden layer the kind of activation of each of its units.
    """

    names: tuple[str, ...]
    inputs: int
    outputs: int
    activations: tuple[tuple[str, ...], ...]


def linear_chain(graph: ConnectivityGraph, module: nn.Module, selected: Sequence[PrunableParameter]) -> LinearChain:
    """Read the chain off the connectivity graph.

    Units have a kind of activation each where a `MixedActivation` stands after their layer among the submodules.

    Raises:
        ValueError: If the network is no such chain with at least one hidden layer, or a layer of it is not selected.

    >>> from sparsecomp.selection import Selection
    >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> linear_chain(ConnectivityGraph.trace(net), net, Selection().resolve(net)).names
    ('0.weight', '2.weight')
    """
    entries = {entry.name: entry for entry in selected}
    names = graph.weights
    if left_out := [name for name in names if name not in entries]:
        raise _no_chain(f"{', '.join(left_out)} is not selected; select every layer")
    for name in names:
        if not isinstance(entries[name].owner, nn.Linear) or len(graph.uses[name]) != 1:
            raise _no_chain(f"{name} is no weight of a Linear layer that is used once")
    if unused := [name for name in entries if name not in names]:
        raise _no_chain(f"{', '.join(unused)} is not used")
    if any(isinstance(step, Mixing) for step in graph.steps):
        raise _no_chain("an operation mixes units, as LayerNorm and softmax do")
    if len(names) < 2:
        raise _no_chain("it has no hidden layer")
    uses = [graph.uses[name][0] for name in names]
    written: list[tuple[str, Sequence[int]]] = [("the input", graph.inputs)]
    written += [(name, [use.target]) for name, use in zip(names, uses, strict=True)]
    for (writer, spaces), name, use in zip(written, names, uses, strict=False):
        whole = list(range(graph.sizes[use.source]))
        if len(spaces) != 1 or passed_on(graph, spaces[0]).get(use.source) != whole:
            raise _no_chain(f"{name} does not read all units of {writer} one by one, and nothing else")
    if not passed_on(graph, uses[-1].target).keys() & {*graph.outputs} or len(graph.outputs) != 1:
        raise _no_chain(f"{names[-1]} does not write the output")
    kinds = tuple(_kinds(module, entries[name].owner) for name in names[:-1])
    return LinearChain(names, graph.sizes[uses[0].source], graph.sizes[uses[-1].target], kinds)


def _no_chain(why: str) -> ValueError:
    return ValueError(
        f"the network must be a chain of fully connected layers with at least one hidden one, all of them selected: {why}. "
        "Use another pruner, as SimilarityPruning, or such a network."
    )


def _kinds(module: nn.Module, layer: nn.Module) -> tuple[str, ...]:
    units = len(layer.weight)  # type: ignore[arg-type]
    after = itertools.islice(itertools.dropwhile(lambda child: child is not layer, module.modules()), 1, None)
    for child in itertools.takewhile(lambda child: not isinstance(child, nn.Linear), after):
        if isinstance(child, MixedActivation) and len(child.activations) == units:
            return child.activations
    return ("",) * units
