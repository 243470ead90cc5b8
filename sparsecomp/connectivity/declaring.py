"""A connectivity graph said by hand."""

import graphlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sparsecomp.connectivity.graph import ConnectivityGraph, GraphBuilder
from sparsecomp.connectivity.steps import WeightUse


class Feed(NamedTuple):
    """The output units of weight `source` are input units of weight `target`.

    Attributes:
        source: Parameter name.
        target: Parameter name.
        offset: The first input unit of `target` that is fed, as after a concatenation.
        positions: Consecutive input units of `target` that one unit of `source` spans, as after flattening; if None,
            as many as fit from `offset` on without a rest, and 1 where there is an offset.
    """

    source: str
    target: str
    offset: int = 0
    positions: int | None = None


def declare(
    module: nn.Module, feeds: Iterable[tuple[str, str] | Feed], inputs: Sequence[str], outputs: Sequence[str]
) -> ConnectivityGraph:
    """See `ConnectivityGraph.declare`."""
    known = _weights(module)
    pairs = [Feed(*feed) for feed in feeds]
    for name in (*(name for feed in pairs for name in feed[:2]), *inputs, *outputs):
        if name not in known:
            raise ValueError(
                f"`feeds`, `inputs` and `outputs` name weights of the network, and {name!r} is none; the weights are "
                f"{', '.join(known)}."
            )
    order = graphlib.TopologicalSorter({name: [feed.source for feed in pairs if feed.target == name] for name in known})
    builder = GraphBuilder()
    written: dict[str, int] = {}
    free: list[tuple[int, int]] = []
    try:
        names = list(order.static_order())
    except graphlib.CycleError as error:
        raise ValueError(
            f"`feeds` must not lead in a circle; got {' -> '.join(error.args[1])}. Leave one of these pairs out."
        ) from error
    for name in names:
        use = known[name]
        source = builder.space(use.source_size, is_input=name in inputs)
        fed = torch.zeros(use.source_size, dtype=torch.bool)
        for feed in pairs:
            if feed.target == name:
                fed[_link(builder, feed, written[feed.source], source)] = True
        free += [(source, unit) for unit in (~fed).nonzero().flatten().tolist() if name not in inputs]
        written[name] = builder.space(use.target_size)
        builder.steps.append(WeightUse(name, source, written[name], use.shape, use.groups, use.transposed))
        if name in outputs or not any(feed.source == name for feed in pairs):
            builder.outputs.append(written[name])
    unitwise = frozenset(name for name, parameter in module.named_parameters() if name not in known)
    return builder.build(input_units=tuple(free), unitwise=unitwise)


def weight_use(
    name: str, weight: torch.Tensor, owner: nn.Module | None, source: int = -1, target: int = -1
) -> WeightUse:
    """How a layer reads its weight."""
    groups = owner.groups if isinstance(owner, _ConvNd) else 1
    transposed = isinstance(owner, _ConvTransposeNd | nn.Embedding | nn.EmbeddingBag)
    return WeightUse(name, source, target, tuple(weight.shape), groups, transposed)


def _weights(module: nn.Module) -> dict[str, WeightUse]:
    """The weights of linear layers, convolutions and embeddings, a tied one once."""
    known: dict[str, WeightUse] = {}
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Linear | _ConvNd | nn.Embedding | nn.EmbeddingBag) and name.endswith("weight"):
            known[name] = weight_use(name, parameter, owner)
    return known


def _link(builder: GraphBuilder, feed: Feed, source: int, target: int) -> slice:
    """Link the spaces and return which target units are fed."""
    have, room = builder.sizes[source], builder.sizes[target] - feed.offset
    positions = feed.positions
    if positions is None:
        positions = 1 if feed.offset else room // have
        if not feed.offset and positions * have != room:
            raise ValueError(
                f"the {have} output units of {feed.source!r} do not spread evenly over the {room} input units of "
                f"{feed.target!r}; say where with Feed({feed.source!r}, {feed.target!r}, offset=..., positions=...)."
            )
    if feed.offset < 0 or positions < 1 or have * positions > room:
        raise ValueError(
            f"{feed} puts {have} units of {positions} positions at {feed.offset} of {builder.sizes[target]} input units; "
            "`offset` must be >= 0, `positions` >= 1, and all must fit."
        )
    builder.link(source, target, torch.arange(have).repeat_interleave(positions), feed.offset)
    return slice(feed.offset, feed.offset + have * positions)
