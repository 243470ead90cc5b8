"""What is traced, what a declared graph says, and why something cannot be traced."""

import pytest
import torch
from networks import NETWORKS, selected
from torch import nn
from torch.nn import functional as F

from sparsecomp.connectivity import ConnectivityGraph, Feed, UntraceableError, effective_sparsity, live_connections
from sparsecomp.models import MLP, MaskedModule, SmallConvNet

FEEDS = {
    "mlp": [("0.weight", "2.weight"), ("2.weight", "4.weight")],
    "conv": [("0.weight", "5.weight")],
    "grouped": [("0.weight", "2.weight"), ("2.weight", "4.weight"), ("4.weight", "7.weight")],
    "upsampling": [("0.weight", "2.weight"), ("2.weight", "5.weight")],
    "dense_block": [
        ("one.weight", "two.weight"),
        Feed("one.weight", "head.weight", positions=1),
        Feed("two.weight", "head.weight", offset=3),
    ],
    "residual": [
        ("stem.weight", "same.weight"),
        *((a, b) for a in ("stem.weight", "same.weight") for b in ("wide.weight", "short.weight")),
        ("wide.weight", "head.weight"),
        ("short.weight", "head.weight"),
    ],
}


def masks_of(module, seed, density=0.4):
    generator = torch.Generator().manual_seed(seed)
    names = [name for name, p in module.named_parameters() if p.dim() > 1]
    return {n: torch.rand(module.get_parameter(n).shape, generator=generator) < density for n in names}


def lives(graph, masks):
    return {name: mask.tolist() for name, mask in live_connections(graph, masks).items()}


@pytest.mark.parametrize("name", FEEDS)
def test_a_declared_graph_is_as_the_traced_one(name):
    module = NETWORKS[name][0]()
    traced, declared = ConnectivityGraph.trace(module), ConnectivityGraph.declare(module, FEEDS[name])
    for seed in range(20):
        assert lives(traced, masks_of(module, seed)) == lives(declared, masks_of(module, seed))


@pytest.mark.parametrize("name", NETWORKS)
def test_example_inputs_change_no_result_and_nothing_in_the_network(name):
    build, shape, _ = NETWORKS[name]
    module = build()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with_shapes = ConnectivityGraph.trace(module, torch.randn(5, *shape, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    without = ConnectivityGraph.trace(module)
    for seed in range(10):
        assert lives(with_shapes, masks_of(module, seed)) == lives(without, masks_of(module, seed))


def test_the_networks_of_the_package_and_their_lightning_module():
    for network in (MLP(64, 10, hidden=(8, 8)), SmallConvNet(1, 10, image_size=8)):
        module = MaskedModule(network, nn.CrossEntropyLoss())
        part = ConnectivityGraph.trace(module, submodule="network")
        whole = ConnectivityGraph.trace(module)
        assert part.weights == whole.weights
        assert all(name.startswith("network.") for name in part.weights)
        masks = masks_of(module, 1, 0.2)
        assert lives(part, masks) == lives(whole, masks)


class Tokens(nn.Module):
    """Patches, an embedding of positions, LayerNorm, a gated block, the mean over tokens."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, 4, 2, stride=2)
        self.places = nn.Parameter(torch.zeros(1, 4, 4))
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.places
        gate, value = self.up(self.norm(x)).chunk(2, dim=-1)
        x = x + self.down(F.gelu(gate) * value)
        return self.head(x.mean(dim=1))


def test_tokens_by_hand():
    module = Tokens()
    graph = ConnectivityGraph.trace(module, torch.zeros(2, 1, 4, 4))
    masks = {n: torch.ones_like(module.get_parameter(n), dtype=torch.bool) for n in graph.weights}
    assert effective_sparsity(graph, masks) == 0.0
    assert "places" in graph.unitwise
    masks["down.weight"][:, 1] = False  # what makes value 1: rows 1 and 4 of `up`
    live = live_connections(graph, masks)
    assert live["up.weight"].any(1).tolist() == [True, False, True, True, False, True]
    masks["down.weight"][:] = False  # the residual is left, without the branch
    counts = {name: int(mask.sum()) for name, mask in live_connections(graph, masks).items()}
    assert counts == {"patch.weight": 16, "up.weight": 0, "down.weight": 0, "head.weight": 8}


class Calls(nn.Module):
    """A forward pass given as a function of (self, x), with the layers it may use."""

    def __init__(self, forward):
        super().__init__()
        self.conv = nn.Conv1d(2, 4, 1)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.matrix = nn.Parameter(torch.ones(4, 3))
        self.attention = nn.MultiheadAttention(4, 2)
        self.call = forward

    def forward(self, x):
        return self.call(self, x)


def flipped(self, x):
    return self.b(self.a(x) if x.sum() > 0 else x)


@pytest.mark.parametrize(
    ("forward", "shape", "reason"),
    [
        (flipped, None, "forward pass of Calls cannot be traced: TraceError: symbolically traced variables"),
        (lambda self, x: self.b(self.a(x).flip(-1)), None, r"node 'flip' \(call_method of flip\).*not known how"),
        (lambda self, x: self.b(self.a(x).view(2, 4)), None, r"'view'.*new shape is not known; give `example_inputs`"),
        (
            lambda self, x: self.attention(x, x, self.a(x))[0],
            None,
            r"of MultiheadAttention\).*not known how this layer",
        ),
        (lambda self, x: self.b(self.conv(x)), None, r"node 'b'.*reads units at dimension -1, .* at dimension -2"),
        (lambda self, x: self.b(self.a(x).T), None, r"node 'getattr_1'"),
        (lambda self, x: self.a(x).view(-1, 2, 2), (5, 4), r"splits the units: \(5, 4\) .* becomes \(5, 2, 2\)"),
        (lambda self, x: self.conv(x).view(-1), (2, 2, 1), "merges the batch with the units"),
        (lambda self, x: F.linear(x, self.a.weight @ self.b.weight), None, "cannot be followed"),
        (lambda self, x: self.a(x), (5, 3), r"`example_inputs` is what forward takes, and Calls.forward fails on it"),
        (lambda self, x: x * 2, None, "no output of Calls.forward depends on a weight"),
    ],
)
def test_what_cannot_be_traced_says_why(forward, shape, reason):
    with pytest.raises(UntraceableError, match=reason) as raised:
        ConnectivityGraph.trace(Calls(forward), None if shape is None else torch.zeros(shape))
    assert "declare" in str(raised.value) or "Give" in str(raised.value)


@pytest.mark.parametrize(
    ("forward", "shape", "live"),
    [
        (lambda self, x: F.linear(self.a(x), self.b.weight), None, {"a.weight": 4, "b.weight": 4}),
        (lambda self, x: self.a(x) @ self.matrix, None, {"a.weight": 4, "matrix": 3}),
        (lambda self, x: self.b(self.a(x))[..., 1:3], None, {"a.weight": 4, "b.weight": 2}),
        (lambda self, x: self.b(self.a(x)).sum(-1), None, {"a.weight": 4, "b.weight": 4}),
        (lambda self, x: self.b(self.a(x)).softmax(-1), None, {"a.weight": 4, "b.weight": 4}),
        (lambda self, x: self.b(self.conv(x).permute(0, 2, 1)), (3, 2, 5), {"conv.weight": 2, "b.weight": 4}),
        (lambda self, x: self.b(self.conv(x).view(x.size(0), -1)), None, {"conv.weight": 2, "b.weight": 4}),
        (lambda self, x: self.b(x + self.a(x)), None, {"a.weight": 4, "b.weight": 16}),
        (
            lambda self, x: self.b(torch.cat([self.a(x)[..., :2], x[..., 2:]], -1)),
            (3, 4),
            {"a.weight": 4, "b.weight": 12},
        ),
    ],
)
def test_operations_by_hand(forward, shape, live):
    """Unit 1 alone comes from the first layer; further layers are whole."""
    module = Calls(forward)
    graph = ConnectivityGraph.trace(module, None if shape is None else torch.zeros(shape))
    masks = {name: torch.ones_like(module.get_parameter(name), dtype=torch.bool) for name in graph.weights}
    first = graph.weights[0]
    masks[first] &= (torch.arange(4) == 1).view(-1, *[1] * (masks[first].dim() - 1))
    assert {name: int(mask.sum()) for name, mask in live_connections(graph, masks).items()} == live


def test_weights_that_are_not_used_are_not_live():
    module = nn.ModuleDict({"net": nn.Linear(2, 2), "idle": nn.Linear(3, 3)})
    graph = ConnectivityGraph.trace(module, submodule="net")
    masks = {"net.weight": torch.ones(2, 2) > 0, "idle.weight": torch.ones(3, 3) > 0}
    assert effective_sparsity(graph, masks) == 9 / 13


def test_a_parametrized_layer_is_not_traced():
    module = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(UntraceableError):
        ConnectivityGraph.trace(module)


def test_declared_inputs_and_outputs():
    """A hidden weight that also reads the input, and one that also is an output."""
    module = NETWORKS["mlp"][0]()
    masks = {n: torch.ones_like(module.get_parameter(n), dtype=torch.bool) for n in selected(module).values()}
    masks["0.weight"][:], masks["4.weight"][:] = False, False
    feeds = FEEDS["mlp"]
    assert effective_sparsity(ConnectivityGraph.declare(module, feeds), masks) == 1.0
    graph = ConnectivityGraph.declare(module, feeds, inputs=["2.weight"], outputs=["2.weight"])
    assert effective_sparsity(graph, masks) == 18 / 30


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ([("0.weight", "9.weight")], "'9.weight' is none; the weights are 0.weight, 2.weight, 4.weight"),
        ([("0.weight", "4.weight")], "4 output units of '0.weight' do not spread evenly over the 3 input units"),
        ([Feed("0.weight", "2.weight", offset=1)], "puts 4 units of 1 positions at 1 of 4 input units"),
        ([("0.weight", "2.weight"), ("2.weight", "0.weight")], r"must not lead in a circle; got .*weight -> "),
    ],
)
def test_a_declaration_that_does_not_fit_says_why(feeds, message):
    with pytest.raises(ValueError, match=message):
        ConnectivityGraph.declare(NETWORKS["mlp"][0](), feeds)
