"""The networks: what is in them, what they map to, and what they refuse."""

import pytest
import torch
from torch import nn

from sparsecomp.connectivity import ConnectivityGraph, UntraceableError, live_connections
from sparsecomp.models import MLP, RowTransformer, SmallConvNet
from sparsecomp.models.row_transformer import attend


def kinds(network):
    return [type(layer).__name__ for layer in network]


def test_mlp():
    network = MLP(6, 3, hidden=(5, 4))
    assert kinds(network) == ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [tuple(p.shape) for p in network.parameters()] == [(5, 6), (5,), (4, 5), (4,), (3, 4), (3,)]
    x = torch.randn(7, 2, 3)
    a, b, c = (layer for layer in network if isinstance(layer, nn.Linear))
    by_hand = x.reshape(7, 6)
    for layer in (a, b):
        by_hand = (by_hand @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(network(x), by_hand @ c.weight.T + c.bias)


def test_mlp_without_a_hidden_layer_is_linear():
    assert kinds(MLP(6, 3, hidden=())) == ["Flatten", "Linear"]


def test_mlp_takes_another_activation_and_makes_one_for_each_layer():
    network = MLP(6, 3, hidden=(5, 4), activation=nn.PReLU)
    assert kinds(network) == ["Flatten", "Linear", "PReLU", "Linear", "PReLU", "Linear"]
    assert network[2] is not network[4]


def test_the_default_mlp_is_the_one_of_the_experiments():
    assert [tuple(p.shape) for p in MLP(64, 10).parameters() if p.dim() > 1] == [(128, 64), (128, 128), (10, 128)]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0, 3), ValueError, "`in_features` is the number of inputs .* >= 1; got 0"),
        ((3, 0), ValueError, "`out_features` is the number of outputs"),
        ((3, 3, (4, -1)), ValueError, "`hidden` is the width of each hidden layer .* got -1"),
        ((3, 3, (4, 1.5)), TypeError, "`hidden` .* got 1.5 of type float"),
        ((3.0, 3), TypeError, "`in_features` .* got 3.0 of type float"),
        ((True, 3), TypeError, "`in_features` .* got True of type bool"),
    ],
)
def test_mlp_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        MLP(*arguments)


def test_small_conv_net():
    network = SmallConvNet(1, 10, image_size=8)
    block = ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    assert kinds(network) == [*block, *block, "Flatten", "Linear"]
    # 1 -> 16 -> 32 -> linear 128 -> classes
    assert [tuple(p.shape) for p in network.parameters() if p.dim() > 1] == [(16, 1, 3, 3), (32, 16, 3, 3), (10, 128)]
    x = torch.randn(5, 1, 8, 8)
    assert nn.Sequential(*list(network)[:-1])(x).shape == (5, 128)
    assert network(x).shape == (5, 10)


@pytest.mark.parametrize(("channels", "size", "inputs"), [((3,), 6, 18 * 1.5), ((2, 3, 4), 16, 16), ((), 4, 32)])
def test_small_conv_net_of_other_sizes(channels, size, inputs):
    network = SmallConvNet(2, 7, image_size=size, channels=channels)
    assert network[-1].in_features == inputs
    assert network(torch.randn(3, 2, size, size)).shape == (3, 7)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((1, 10, 6), ValueError, "`image_size` .* multiple of 4, as each of the 2 convolutions .* got 6"),
        ((1, 10, 0), ValueError, "`image_size` is the height and width"),
        ((0, 10, 8), ValueError, "`in_channels` is the number of channels"),
        ((1, 0, 8), ValueError, "`out_features` is the number of outputs"),
        ((1, 10, 8, (0,)), ValueError, "`channels` is the channels after each convolution"),
        ((1, 10, 8.0), TypeError, "`image_size` .* got 8.0 of type float"),
    ],
)
def test_small_conv_net_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        SmallConvNet(*arguments)


def test_attention_is_softmax_of_products_head_by_head():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 6).double()
    parts = []
    for head in (slice(0, 3), slice(3, 6)):
        weights = (q[..., head] @ k[..., head].transpose(1, 2) / 3**0.5).softmax(-1)
        parts.append(weights @ v[..., head])
    torch.testing.assert_close(attend(q, k, v, 2), torch.cat(parts, -1))


def test_row_transformer():
    torch.manual_seed(0)
    network = RowTransformer(8, 8, 10).eval()
    linear = [tuple(layer.weight.shape) for layer in network.modules() if isinstance(layer, nn.Linear)]
    block = [(32, 32)] * 4 + [(128, 32), (32, 128)]
    assert linear == [(32, 8), *block, *block, (10, 32)]
    x = torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(network(x), network(x[:, 0]))
    assert not torch.allclose(network(x), network(x.flip(-2)), atol=1e-4)  # rows have places
    alone = torch.cat([network(one[None]) for one in x])
    torch.testing.assert_close(network(x), alone)


@pytest.mark.parametrize("depth", [1, 2])
def test_connectivity_of_the_row_transformer_is_that_of_its_derivatives(depth):
    """Without the norms, which mix all units: a unit of a head stays in its head."""
    torch.manual_seed(0)
    network = RowTransformer(3, 4, 2, width=4, heads=2, depth=depth, feedforward=3)
    for name, layer in list(network.named_modules()):
        if isinstance(layer, nn.LayerNorm):
            network.set_submodule(name, nn.Identity())
    graph = ConnectivityGraph.trace(network)
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in network.named_parameters() if name in graph.uses}
    block = "blocks.0."
    for name in (block + "value.weight", block + "query.weight", block + "key.weight"):
        masks[name][:2] = False  # the first head has nothing to say ...
    live = live_connections(graph, masks)
    assert not live[block + "projection.weight"][:, :2].any()
    assert live[block + "projection.weight"][:, 2:].all()
    masks[block + "query.weight"][0] = True  # ... or something, by one query, which all units of the head may hear
    live = live_connections(graph, masks)
    assert live[block + "projection.weight"][:, :2].all()
    masks[block + "projection.weight"][:, :2] = False
    assert not live_connections(graph, masks)[block + "query.weight"][:2].any()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0, 8, 10), ValueError, "`in_features` is the number of values in a row"),
        ((8, 8, 10, 32, 3), ValueError, "`width` .* multiple of the 3 heads; got 32"),
        ((8, 8, 10, 32, 2, 0), ValueError, "`depth` is the number of blocks"),
        ((8, 8, 10, 32, 2, 2, 0), ValueError, "`feedforward` is the hidden units"),
        ((8, 8.5, 10), TypeError, "`tokens` .* got 8.5"),
    ],
)
def test_row_transformer_refuses(arguments, error, match):
    with pytest.raises(error, match=match):
        RowTransformer(*arguments)


@pytest.mark.parametrize("shape", [(5, 64), (8, 8), (5, 1, 1, 8), (5, 3, 8, 8), (5, 1, 8, 4)])
def test_row_transformer_refuses_other_pictures(shape):
    with pytest.raises(ValueError, match=r"must be \(batch, \[channels,\] rows, 8\) with 8 rows in all; got"):
        RowTransformer(8, 8, 10)(torch.zeros(shape))


def interleaved(queries, keys, values, heads):
    return queries + keys + values


interleaved.__name__ = "attend"


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.read, self.out = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.read(x)
        return self.out(interleaved(h, h, h, 2))


torch.fx.wrap("interleaved")


def test_another_function_of_that_name_is_not_taken_for_attention():
    with pytest.raises(UntraceableError, match="not known how this operation moves units"):
        ConnectivityGraph.trace(Own())
