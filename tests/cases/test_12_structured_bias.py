"""A removed channel does not go on emitting its bias. https://github.com/pytorch/pytorch/issues/38598"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsecomp import ERK, Global, Layerwise, Magnitude, OneShot, Pruning, Random, prune

LAYERS = {
    "conv1d": (lambda: nn.Conv1d(3, 6, 3), (3, 8)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3), (3, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(3, 6, 3), (3, 4, 4, 4)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 8, 8)),
    "transposed1d": (lambda: nn.ConvTranspose1d(3, 6, 3), (3, 8)),
    "transposed2d": (lambda: nn.ConvTranspose2d(3, 6, 3), (3, 8, 8)),
    "linear": (lambda: nn.Linear(8, 6), (8,)),
}


def build(kind):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer = make()
    nn.init.constant_(layer.bias, 0.7)
    return layer, torch.randn(4, *shape)


def channels(out):
    """(batch, channels, ...) -> (channels, everything else)."""
    return out.detach().movedim(1, 0).flatten(1)


@pytest.mark.parametrize("criterion", [Magnitude(), Random(3)])
@pytest.mark.parametrize("allocation", [Layerwise("unit"), Global("unit"), ERK("unit")])
@pytest.mark.parametrize("kind", LAYERS)
def test_removed_channels_emit_exactly_zero(kind, allocation, criterion):
    layer, x = build(kind)
    dense = channels(layer(x))
    store = prune(layer, criterion, 0.5, allocation=allocation)
    gone = ~store.masks["bias"]
    assert gone.tolist().count(True) == 3
    for inputs in (x, torch.zeros_like(x), 1e6 * x, -x):
        assert not channels(layer(inputs))[gone].any()
    assert_same(channels(layer(x))[~gone], dense[~gone])
    assert bool((layer.bias[~gone] == torch.tensor(0.7)).all())


@pytest.mark.parametrize("kind", LAYERS)
def test_sparsity_counts_weights_only(kind):
    layer, _ = build(kind)
    store = prune(layer, Magnitude(), 0.5, allocation=Layerwise("unit"))
    assert store.sparsity == 0.5
    assert list(store.layer_sparsity()) == ["weight"]


def test_which_channels_go_by_hand():
    conv, x = build("conv2d")
    norms = conv.weight.detach().abs().mean((1, 2, 3))
    lowest = set(norms.argsort()[:2].tolist())
    prune(conv, Magnitude(), 2 / 6, allocation=Layerwise("unit"))
    silent = {channel for channel, values in enumerate(channels(conv(x))) if not values.any()}
    assert silent == lowest


def test_a_layer_without_bias_and_weight_granularity_leave_biases_alone():
    prune(layer := nn.Conv2d(3, 6, 3, bias=False), Magnitude(), 0.5, allocation=Layerwise("unit"))
    assert layer.bias is None
    layer, _ = build("conv2d")
    store = prune(layer, Magnitude(), 0.9)
    assert list(store.masks) == ["weight"]
    assert bool((layer.bias == torch.tensor(0.7)).all())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=0.05),
    ],
)
def test_removed_channels_stay_silent_in_training(optimizer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, 4))
    module, silent = Lit(net, optimizer), []
    x = torch.randn(5, 1, 8, 8)

    def look(trainer, module):
        values = channels(module.net[0](x))
        silent.append([channel for channel in range(6) if not values[channel].any()])

    g = torch.Generator().manual_seed(0)
    images = TensorDataset(torch.randn(32, 1, 8, 8, generator=g), torch.randint(0, 4, (32,), generator=g))
    pruner = Pruning(Magnitude(), OneShot(0.5, at=1), Layerwise("unit"))
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=3).fit(module, DataLoader(images, batch_size=8))
    assert silent[:3] == [[], [], []]
    assert len(silent[3]) == 3
    assert silent[3:] == [silent[3]] * 9
    assert (~pruner.masks["net.0.bias"]).nonzero().flatten().tolist() == silent[3]
    # The readout is a layer too: of its 4 classes two always get exactly 0.
    assert int((module.net(x) == 0).all(0).sum()) == 2
