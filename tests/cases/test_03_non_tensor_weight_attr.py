"""`weight` may be a number, None or a buffer. https://github.com/Lightning-AI/pytorch-lightning/issues/13411"""

import pytest
import torch
from helpers import Lit, assert_same, loader, trainer
from torch import nn

from sparsecomp import Magnitude, OneShot, Pruning, Selection, prune


class Scale(nn.Module):
    """Multiplies by whatever `weight` is."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x):
        return x if self.weight is None else x * self.weight


class BufferScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.full((4, 4), 2.0))
        self.register_buffer("bias", None)

    def forward(self, x):
        return x * self.weight.mean()


class PropertyScale(nn.Module):
    @property
    def weight(self):
        return torch.full((4, 4), 3.0)

    @property
    def bias(self):
        raise RuntimeError("looked at")

    def forward(self, x):
        return x * self.weight.mean()


class FrozenLinear(nn.Linear):
    """A prunable layer type whose weight is a buffer."""

    def __init__(self):
        super().__init__(4, 4)
        weight = self.weight.detach()
        del self.weight
        self.register_buffer("weight", weight)


class ComputedLinear(nn.Linear):
    """A prunable layer type that has None for a weight."""

    def __init__(self):
        super().__init__(4, 4, bias=False)
        self.weight = None

    def forward(self, x):
        return x * 2


class LossInside(nn.Module):
    """Passes x on; its loss module holds class weights as a buffer."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(4))

    def forward(self, x):
        return x


ODD = {
    "int": lambda: Scale(3),
    "float": lambda: Scale(0.5, bias=0.1),
    "none": lambda: Scale(None),
    "string": lambda: Scale(None, bias="none"),
    "plain_tensor": lambda: Scale(torch.tensor(2.0), bias=torch.zeros(4)),
    "buffer": BufferScale,
    "property": PropertyScale,
    "norm_without_affine": lambda: nn.LayerNorm(4, elementwise_affine=False),
    "batch_norm_without_affine": lambda: nn.BatchNorm1d(4, affine=False),
    "linear_with_buffer": FrozenLinear,
    "linear_with_none": ComputedLinear,
    "loss": LossInside,
}


def build(odd):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 4), ODD[odd]())


@pytest.mark.parametrize("odd", ODD)
def test_only_parameters_are_selected(odd):
    net = build(odd)
    store = prune(net, Magnitude(), 0.5)  # a warning would be an error
    assert list(store.masks) == ["0.weight"]
    assert store.sparsity == 0.5
    assert int((net[0].weight == 0).sum()) == 32


@pytest.mark.parametrize("odd", ODD)
def test_training_with_the_odd_module(odd):
    module = Lit(build(odd))
    before = {name: buffer.clone() for name, buffer in module.named_buffers() if name.endswith("weight")}
    pruner = Pruning(Magnitude(), OneShot(0.5, at=1))
    trainer(pruner, max_epochs=2).fit(module, loader(), loader())
    assert list(pruner.masks) == ["net.0.weight"]
    assert int((module.net[0].weight == 0).sum()) == 32
    assert_same({name: buffer for name, buffer in module.named_buffers() if name.endswith("weight")}, before)


@pytest.mark.parametrize("odd", ["int", "none", "buffer", "property", "linear_with_buffer"])
def test_asking_for_it_by_name_says_that_it_is_no_parameter(odd):
    with pytest.raises(ValueError, match=r"'1\.weight' matches nothing in the model; near it are: .*0\.weight"):
        Selection(include=["1.weight"]).resolve(build(odd))
