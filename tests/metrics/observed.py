"""A small network on a tree function, and what the metrics see of it."""

import copy

import torch
from torch import nn

from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.functions import Tree
from sparsecomp.metrics import NetworkStructure, watch
from sparsecomp.metrics.watching import watched_layers
from sparsecomp.probe import Probe


class Collector:
    """Takes batches as a metric does."""

    def __init__(self):
        self.batches = []

    def update(self, batch):
        self.batches.append(batch)


def tree_network(seed=0, activation=nn.ReLU):
    """4-6-5-1, half of its weights zero."""
    generator = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, 6), activation(), nn.Linear(6, 5), activation(), nn.Linear(5, 1))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        for index in (0, 2):
            net[index].weight *= torch.rand(net[index].weight.shape, generator=generator) < 0.5
    return net


def structure(net, graph=True, function=None, masks=None):
    weights = {name: layer.weight.detach() for name, layer in watched_layers(net).items()}
    masks = {name: weight != 0 for name, weight in weights.items()} if masks is None else masks
    return NetworkStructure(weights, masks, ConnectivityGraph.trace(net) if graph else None, "a loop.", function)


def samples(count=4, rows=24, seed=0, function=None):
    """Batches (x, y) of a tree function."""
    function = function or Tree(depth=2)
    generator = torch.Generator().manual_seed(seed)
    drawn = [function.sample_inputs(rows, generator) for _ in range(count)]
    return [(x, function(x)) for x in drawn]


def observed(net, data=None, **options):
    """What each batch looks like to a metric."""
    collector, data = Collector(), samples() if data is None else data
    options = {"function": Tree(depth=2)} | options
    watch(net, [collector], data, structure(net, **options), Probe(len(data)))
    return collector.batches


def permuted(net):
    """The same function with the units of both hidden layers in another order."""
    net = copy.deepcopy(net)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for index in (0, 2):
            layer, reader = net[index], net[index + 2]
            order = torch.randperm(layer.out_features, generator=generator)
            layer.weight.copy_(layer.weight[order])
            layer.bias.copy_(layer.bias[order])
            reader.weight.copy_(reader.weight[:, order])
    return net


def rescaled(net):
    """The same function with each hidden unit a -> c a and the weights that read it divided by c; of a ReLU network."""
    net = copy.deepcopy(net)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for index in (0, 2):
            layer, reader = net[index], net[index + 2]
            c = torch.rand(layer.out_features, generator=generator) * 10 + 0.1
            layer.weight.mul_(c[:, None])
            layer.bias.mul_(c)
            reader.weight.div_(c)
    return net
