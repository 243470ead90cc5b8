"""What a probe sees of a module, and that looking leaves no trace."""

import random

import numpy as np
import pytest
import torch
from helpers import Lit, assert_same, clone, mlp
from torch import nn

from sparsecomp.probe import Probe, like_module, untouched


class Dirty(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 2))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.seen += len(x)
        self.replaced = torch.ones(3)
        self.register_buffer("new", torch.ones(1))
        return self.net(x + torch.rand(1) + random.random() + np.random.rand())  # noqa: NPY002


def state(module):
    return {
        "buffers": {name: buffer.clone() for name, buffer in module.named_buffers()},
        "modes": [child.training for child in module.modules()],
        "grads": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "flags": [p.requires_grad for p in module.parameters()],
        "torch": torch.get_rng_state(),
        "python": repr(random.getstate()),
        "numpy": repr(np.random.get_state()),  # noqa: NPY002
    }


@pytest.fixture
def dirty():
    torch.manual_seed(0)
    module = Dirty()
    module.net[1].eval()  # modes are mixed
    module.net[3].bias.requires_grad_(False)
    module.net[0].weight.grad = torch.ones(3, 4)
    return module


@pytest.mark.parametrize("training", [False, True])
def test_untouched_restores_everything(dirty, training):
    before, buffer, gradient = clone(state(dirty)), dirty.replaced, dirty.net[0].weight.grad
    with untouched(dirty, training=training):
        assert all(child.training is training for child in dirty.modules())
        assert dirty.net[0].weight.grad is None
        dirty(torch.randn(8, 4)).sum().backward()
        dirty.requires_grad_(False)
        assert not torch.equal(torch.get_rng_state(), before["torch"])
    assert_same(state(dirty), before)
    assert dirty.replaced is buffer
    assert dirty.net[0].weight.grad is gradient
    assert dirty.nothing is None


def test_untouched_restores_after_an_error(dirty):
    before = clone(state(dirty))

    def fail():
        with untouched(dirty, training=True):
            dirty(torch.randn(8, 4)).sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert_same(state(dirty), before)


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_gradients_are_on_inside(dirty, outside):
    with outside():
        with untouched(dirty):
            assert torch.is_grad_enabled()
            dirty(torch.randn(8, 4)).sum().backward()
        assert not torch.is_grad_enabled()


def test_output_is_connected_to_input_and_the_batch_is_left_alone():
    x = torch.randn(3, 16)
    output = Probe()(mlp(), (x, torch.zeros(3)))
    assert torch.equal(output.inputs, x)
    assert torch.autograd.grad(output.outputs.sum(), output.inputs)[0].shape == (3, 16)
    assert not x.requires_grad


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: [x, None]])
def test_forms_of_batches(form):
    x = torch.randn(3, 16)
    assert Probe().inputs(form(x)) is x


def test_integer_inputs():
    output = Probe()(nn.Embedding(5, 2), torch.tensor([1, 2]))
    assert output.outputs.shape == (2, 2)
    assert not output.inputs.requires_grad


@pytest.mark.parametrize("batch", [{"x": torch.zeros(2)}, [], ["text"], None])
def test_other_batches_are_refused(batch):
    with pytest.raises(TypeError, match=r"must be a tensor x or begin with one.*Pass a Probe whose `inputs`"):
        Probe()(mlp(), batch)


def test_other_outputs_are_refused():
    with pytest.raises(TypeError, match=r"Identities must return a tensor; got tuple.*whose `outputs`"):
        Probe()(type("Identities", (nn.Identity,), {"forward": lambda _, x: (x, x)})(), torch.zeros(2, 2))


def test_overrides_fit_other_modules():
    class Named(Probe):
        def inputs(self, batch):
            return batch["x"]

        def outputs(self, module, inputs, batch):
            return module(inputs) * batch["mask"]

    batch = {"x": torch.randn(2, 16), "mask": torch.tensor([[1.0], [0.0]])}
    output = Named()(mlp(), batch)
    assert output.outputs[0].any()
    assert not output.outputs[1].any()


def test_loss_is_that_of_training_step_and_nothing_is_logged():
    module = Lit(mlp())  # without a Trainer `self.log` warns
    batch = (torch.randn(4, 16), torch.tensor([0, 1, 2, 3]))
    loss = Probe().loss(module, batch)
    assert torch.equal(loss, nn.functional.cross_entropy(module(batch[0]), batch[1]))
    assert "log" not in vars(module)
    own = module.log = lambda *_, **__: None
    Probe().loss(module, batch)
    assert module.log is own


def test_loss_of_a_dict():
    module = Lit(mlp())
    module.training_step = lambda batch, _: {"loss": batch.sum()}
    assert Probe().loss(module, torch.ones(3)) == 3


def test_losses_that_are_none():
    with pytest.raises(TypeError, match="Sequential has no training_step to take the loss from"):
        Probe().loss(mlp(), None)
    module = Lit(mlp())
    module.training_step = lambda *_: None
    with pytest.raises(TypeError, match="training_step of Lit must return a loss here; got NoneType"):
        Probe().loss(module, None)
    assert "log" not in vars(module)


@pytest.mark.parametrize(("batches", "error"), [(0, ValueError), (1.5, TypeError)])
def test_number_of_batches(batches, error):
    with pytest.raises(error, match="`batches` is the number of training batches"):
        Probe(batches)


def test_batches_take_the_precision_of_the_module():
    batch = {"x": torch.zeros(2), "y": [torch.tensor([1])], "name": "a"}
    half = like_module(batch, mlp().bfloat16())
    assert (half["x"].dtype, half["y"][0].dtype, half["name"]) == (torch.bfloat16, torch.int64, "a")
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    assert like_module(batch, mixed)["x"].dtype is torch.float32
    assert like_module(batch, nn.ReLU()) is batch
