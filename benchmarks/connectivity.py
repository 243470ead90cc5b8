"""Effective sparsity of 25 million weights against one dense forward pass of the same network."""

import itertools

import torch
from torch import nn

from benchmarks.timing import medians
from sparsecomp.connectivity import ConnectivityGraph, effective_sparsity

BATCH = 64
DENSITY = 0.1


def rows(rounds: int) -> list[tuple[str, float, float]]:
    """(what, ratio to a dense forward at batch 64, the limit)."""
    generator = torch.Generator().manual_seed(0)
    widths = [1000, 5000, 1000, 5000, 1000, 5000]
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    network = nn.Sequential(*layers)
    graph = ConnectivityGraph.trace(network)
    masks = {
        name: torch.rand(parameter.shape, generator=generator) < DENSITY
        for name, parameter in network.named_parameters()
        if name.endswith("weight")
    }
    x = torch.randn(BATCH, widths[0], generator=generator)

    @torch.no_grad()
    def forward() -> object:
        return network(x)

    seconds = medians({"sparsity": lambda: effective_sparsity(graph, masks), "forward": forward}, rounds)
    return [("effective sparsity of 25 million weights", seconds["sparsity"] / seconds["forward"], 1 / 3)]
