"""Small networks of every understood kind, and an independent way to find live connections: walk over single units."""

import itertools

import networkx as nx
import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    """An identity shortcut and then a 1x1 convolution as shortcut."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.same = nn.Conv2d(3, 3, 3, padding=1)
        self.wide = nn.Conv2d(3, 4, 1)
        self.short = nn.Conv2d(3, 4, 1, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = x + torch.tanh(self.same(x))
        x = torch.tanh(self.wide(x)) + self.short(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class DenseBlock(nn.Module):
    """Everything before is concatenated, the input too."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(2, 3)
        self.two = nn.Linear(3, 2)
        self.head = nn.Linear(5, 2)

    def forward(self, x):
        one = torch.tanh(self.one(x))
        two = torch.tanh(self.two(one))
        return self.head(torch.cat([one, two], dim=-1))


class Tied(nn.Module):
    """One square weight used twice."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(2, 3)
        self.one = nn.Linear(3, 3)
        self.two = nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.two(torch.tanh(self.one(torch.tanh(self.start(x)))))))


def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def wide_mlp():
    """A layer of 8 inputs is counted by words of eight."""
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)
    )


def grouped():
    return nn.Sequential(
        nn.Conv1d(2, 4, 1),
        nn.Tanh(),
        nn.Conv1d(4, 6, 2, groups=2),
        nn.Tanh(),
        nn.Conv1d(6, 6, 1, groups=6),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(18, 2),
    )


def upsampling():
    return nn.Sequential(
        nn.Conv1d(2, 4, 1), nn.Tanh(), nn.ConvTranspose1d(4, 6, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(30, 2)
    )


# Name -> (constructor, shape of one input, links between units). A link is (from weight or "in", to weight, map of
# source unit to target units), written by hand and not by the code under test.
def _same(n, offset=0):
    return {unit: [unit + offset] for unit in range(n)}


def _spread(n, positions):
    return {unit: list(range(unit * positions, (unit + 1) * positions)) for unit in range(n)}


NETWORKS = {
    "mlp": (mlp, (3,), [("0", "2", _same(4)), ("2", "4", _same(3))]),
    "wide_mlp": (wide_mlp, (3,), [("0", "2", _same(8)), ("2", "4", _same(16))]),
    "conv": (conv, (2, 4, 4), [("0", "5", _spread(3, 4))]),
    "grouped": (grouped, (2, 4), [("0", "2", _same(4)), ("2", "4", _same(6)), ("4", "7", _spread(6, 3))]),
    "upsampling": (upsampling, (2, 4), [("0", "2", _same(4)), ("2", "5", _spread(6, 5))]),
    "residual": (
        Residual,
        (2, 4, 4),
        [(a, b, _same(3)) for a in ("stem", "same") for b in ("wide", "short")]
        + [("stem", "same", _same(3)), ("wide", "head", _same(4)), ("short", "head", _same(4))],
    ),
    "dense_block": (
        DenseBlock,
        (2,),
        [("one", "two", _same(3)), ("one", "head", _same(3)), ("two", "head", _same(2, 3))],
    ),
    "tied": (Tied, (2,), [("start", "one", _same(3)), ("one", "two", _same(3)), ("two", "head", _same(3))]),
}


def selected(module):
    """Name of the layer -> name of its weight, also for tied ones."""
    first = {id(p): name for name, p in module.named_parameters()}
    return {
        name: first[id(layer.weight)]
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd)
    }


def connections(layer):
    """Every weight of a layer as (index, source unit, target unit)."""
    groups = getattr(layer, "groups", 1)
    transposed = isinstance(layer, nn.ConvTranspose1d)
    shape = layer.weight.shape
    for index in itertools.product(*map(range, shape)):
        first, second = index[:2]
        group = first // (shape[0] // groups)
        across = group * shape[1] + second
        yield index, *((first, across) if transposed else (across, first))


def naive_live(name, module, masks):
    """Live connections by paths in a graph whose nodes are single units."""
    links = NETWORKS[name][2]
    weights = selected(module)
    graph = nx.DiGraph()
    for layer_name, weight_name in weights.items():
        for index, source, target in connections(module.get_submodule(layer_name)):
            graph.add_node((layer_name, "in", source))
            graph.add_node((layer_name, "out", target))
            if masks[weight_name][index]:
                graph.add_edge((layer_name, "in", source), (layer_name, "out", target))
    fed, feeding = {target for _, target, _ in links}, {source for source, _, _ in links}
    for source, target, units in links:
        for unit, places in units.items():
            graph.add_edges_from(((source, "out", unit), (target, "in", place)) for place in places)
    for node in list(graph):
        layer_name, side, _ = node
        if side == "in" and layer_name not in fed:
            graph.add_edge("input", node)
        if side == "out" and layer_name not in feeding:
            graph.add_edge(node, "output")
    reached, reaching = nx.descendants(graph, "input"), nx.ancestors(graph, "output")
    live = {weight_name: torch.zeros_like(masks[weight_name]) for weight_name in weights.values()}
    for layer_name, weight_name in weights.items():
        for index, source, target in connections(module.get_submodule(layer_name)):
            if (
                masks[weight_name][index]
                and (layer_name, "in", source) in reached
                and (layer_name, "out", target) in reaching
            ):
                live[weight_name][index] = True
    return live
