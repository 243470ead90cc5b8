"""What metrics are fed with, and that looking leaves no trace."""

import copy

import numpy as np
import pytest
import torch
from helpers import assert_same
from observed import Collector, observed, samples, structure, tree_network
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsecomp.connectivity import ConnectivityGraph
from sparsecomp.functions import Tree
from sparsecomp.metrics import (
    FVU,
    ConstituentArity,
    Decodability,
    DistinctFunctions,
    EffectiveFanIn,
    EffectiveSparsity,
    LargestArity,
    NodeAlignment,
    Purity,
    Sparsity,
    functional,
    watch,
)
from sparsecomp.metrics.watching import watched_layers
from sparsecomp.models import SmallConvNet
from sparsecomp.probe import Probe


def taken(metric, batches):
    for batch in batches:
        metric.update(batch)
    return float(metric.compute())


def oracle():
    """A network that computes h1_0 and h1_1 of a product tree and nothing else, with the mask of the tree."""
    tree = Tree(depth=2)

    class Nodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 1)

        def forward(self, x):
            return self.out(self.second(self.first(x).relu()))

    net = Nodes()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.first.weight[0, :2] = net.first.weight[1, :2] = torch.tensor([1.0, -0.5])
        net.first.weight[2, 2:] = net.first.weight[3, 2:] = torch.tensor([0.7, 0.5])
        net.first.bias[1::2] = 1.0
        net.second.weight[0, :2] = net.second.weight[1, 2:] = torch.tensor([1.0, 0.4])
        net.out.weight.fill_(1.0)
    return tree, net


def test_the_mask_of_the_tree_is_pure():
    _, net = oracle()
    batches = observed(net)
    assert taken(Purity(), batches) == 1.0  # the second layer stands at the level of the output
    assert taken(ConstituentArity(), batches) == 2.0
    assert taken(LargestArity(), batches) == 2.0
    assert taken(Sparsity(), batches) == pytest.approx(1 - 14 / 26)
    with torch.no_grad():
        net.first.weight[0, 3] = 0.1
    batches = observed(net)
    assert taken(Purity(), batches) == 0.75
    assert taken(LargestArity(), batches) == 3.0
    assert taken(ConstituentArity(), batches) == pytest.approx((3 + 2 + 2 + 2 + 3 + 2) / 6)


def test_dead_units_are_left_out_of_purity():
    _, net = oracle()
    with torch.no_grad():
        net.first.weight[0, 3] = 0.1
        net.first.bias[0] = -100.0  # never on
    assert taken(Purity(), observed(net)) == 1.0


def test_a_network_of_the_nodes_themselves_is_aligned():
    tree = Tree(depth=2)

    class Truth(nn.Module):
        """Its hidden units are made of the true nodes."""

        def __init__(self):
            super().__init__()
            self.first, self.out = nn.Linear(4, 3), nn.Linear(3, 1)

        def forward(self, x):
            z = self.first(x) * 0
            return self.out(z + torch.cat([-2 * tree.node_values(x)[:, [1, 0]] + 5, x[:, :1]], 1))

    net = Truth()
    graph = ConnectivityGraph.declare(net, [("first.weight", "out.weight")])
    seen = Collector()
    masks = {"first.weight": torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()}
    network = copy.copy(structure(net, graph=False, function=tree, masks=masks))
    object.__setattr__(network, "graph", graph)
    watch(net, [seen], samples(), network, Probe())
    assert taken(NodeAlignment(), seen.batches) == pytest.approx(1, abs=1e-6)
    assert taken(Decodability(), seen.batches) == pytest.approx(1, abs=1e-4)
    object.__setattr__(network, "masks", {"first.weight": torch.ones(3, 4, dtype=torch.bool)})
    vars(network).pop("supports")
    assert taken(NodeAlignment(), seen.batches) == pytest.approx(1, abs=1e-6)
    assert taken(Decodability(), seen.batches) == 0.0  # no unit is known to stay inside


def test_metrics_of_a_ground_truth_against_all_samples_at_once():
    """Streamed sums against the plain way: everything joined, numpy only."""
    net, tree = tree_network(), Tree(depth=2)
    data = samples(count=5, rows=40)
    batches = observed(net, data)
    x = torch.cat([x for x, _ in data])
    with torch.no_grad():
        first = net[1](net[0](x))
        h = torch.cat([first, net[3](net[2](first))], 1).double().numpy()
    nodes = tree.node_values(x)[:, :2].double().numpy()
    live = h.var(0) > 1e-7 * (h**2).mean(0)
    r = np.corrcoef(np.concatenate([h[:, live], nodes], 1), rowvar=False)
    count = int(live.sum())
    assert taken(NodeAlignment(), batches) == pytest.approx(
        functional.node_alignment(torch.from_numpy(r[count:, :count])), rel=1e-5
    )
    assert taken(DistinctFunctions(), batches) == functional.distinct_functions(torch.from_numpy(r[:count, :count]))
    outputs = net(x).detach().double().numpy()
    y = tree(x).double().numpy()
    assert taken(FVU(), batches) == pytest.approx(((y - outputs) ** 2).sum() / ((y - y.mean()) ** 2).sum(), rel=1e-5)


def test_a_convolution_against_all_samples_at_once():
    torch.manual_seed(0)
    net = nn.Sequential(*SmallConvNet(1, 3, image_size=4, channels=(3, 4))).eval()
    data = [(torch.randn(20, 1, 4, 4), torch.zeros(20)) for _ in range(3)]
    batches = observed(net, data)
    x = torch.cat([x for x, _ in data])
    with torch.no_grad():
        inner, last = net[:4](x), net[:9](x)
    seen = torch.cat([batch.activations["4.weight"] for batch in batches])
    assert torch.equal(seen, inner.permute(0, 2, 3, 1).reshape(-1, 3))
    moments = [x.square().mean((0, 2, 3)), inner.square().mean((0, 2, 3)), last.square().mean(0)]
    layers = [net[0], net[4], net[9]]
    fan_in = [functional.effective_fan_in(layer.weight, m) for layer, m in zip(layers, moments, strict=True)]
    assert taken(EffectiveFanIn(), batches) == pytest.approx(float(torch.cat(fan_in).mean()), rel=1e-5)
    assert taken(DistinctFunctions(), batches) == sum(
        functional.distinct_functions(torch.corrcoef(h[:, h.std(0) > 0].T.double()))
        for h in (inner.permute(0, 2, 3, 1).reshape(-1, 3), last)
    )


def test_what_is_seen():
    net = tree_network()
    data = samples(count=2)
    batches = observed(net, data)
    assert len(batches) == 2
    for batch, (x, y) in zip(batches, data, strict=True):
        assert torch.equal(batch.inputs, x)
        assert torch.equal(batch.targets, y)
        with torch.no_grad():
            assert torch.equal(batch.outputs, net(x))
            assert torch.equal(batch.activations["0.weight"], x)
            assert torch.equal(batch.hidden()[1], net[:4](x))
        assert batch.network.hidden == ("2.weight", "4.weight")
        assert batch.network.layers.tolist() == [1] * 6 + [2] * 5


def test_only_the_first_batches_are_seen():
    seen = Collector()
    watch(tree_network(), [seen], samples(count=6), structure(tree_network()), Probe(2))
    assert len(seen.batches) == 2


def test_activations_are_those_before_an_in_place_change():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x):
            h = self.a(x)
            out = self.b(h)
            h.zero_()
            return out

    net, seen = InPlace(), Collector()
    watch(net, [seen], samples(1), structure(net, graph=False), Probe())
    assert seen.batches[0].activations["b.weight"].count_nonzero() > 0


def test_tokens_shared_layers_and_layers_by_keyword():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.idle = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(input=self.a(self.a(x[:, None].expand(-1, 3, -1)))).mean(1)

    net, seen = Odd(), Collector()
    data = samples(1)
    watch(net, [seen], data, structure(net, graph=False), Probe())
    assert list(seen.batches[0].activations) == ["a.weight", "b.weight"]
    assert torch.equal(seen.batches[0].activations["a.weight"], data[0][0].repeat_interleave(3, 0))


def test_what_is_not_watched():
    net = nn.Sequential(nn.Linear(2, 2), nn.ConvTranspose1d(2, 2, 1), nn.Linear(2, 2), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    nn.utils.parametrizations.orthogonal(net[3])
    assert list(watched_layers(net)) == ["0.weight"]


def test_hidden_units_that_cannot_be_seen_are_a_reason():
    net = nn.Sequential(nn.Conv1d(1, 3, 1), nn.ReLU(), nn.ConvTranspose1d(3, 2, 1))
    metric = DistinctFunctions()
    for batch in observed(net, [(torch.randn(5, 1, 4), torch.zeros(5))]):
        metric.update(batch)
    assert metric.compute().isnan()
    assert "read by 2.weight, no weight of a Linear" in metric.reason
    sparsity = EffectiveSparsity()
    assert taken(sparsity, observed(net, [(torch.randn(5, 1, 4), torch.zeros(5))])) == 0


def test_nothing_is_left_behind():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 1))
    net[2].eval()
    net(torch.randn(9, 4)).sum().backward()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(*samples(1)[0]), batch_size=6, shuffle=True, generator=generator)
    state, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    grads = [p.grad.clone() for p in net.parameters()]
    random, order = torch.get_rng_state(), generator.get_state()
    seen = Collector()
    watch(net, [seen], loader, structure(net), Probe())
    assert len(seen.batches) == 4
    assert_same(dict(net.state_dict()), dict(state))
    assert modes == [m.training for m in net.modules()]
    assert_same([p.grad for p in net.parameters()], grads)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(generator.get_state(), order)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not any(h.requires_grad for h in seen.batches[0].activations.values())


def test_hooks_are_gone_after_an_error():
    net = tree_network()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        watch(net, [], [(torch.zeros(2, 3), torch.zeros(2))], structure(net), Probe())
    assert not any(m._forward_pre_hooks for m in net.modules())
