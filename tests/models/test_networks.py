"""The networks: what is in them, what they map to, and what they refuse."""

import pytest
import torch
from torch import nn

from sparsecomp.models import MLP, SmallConvNet


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
