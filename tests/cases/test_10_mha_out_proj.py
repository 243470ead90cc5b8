"""Masks on attention, whose out_proj is read without being called.

https://github.com/pytorch/pytorch/issues/69353 and https://github.com/pytorch/pytorch/issues/78109
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, kept_values, masked_values, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsecomp import Layerwise, Levels, Magnitude, Pruning, prune


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.att = nn.MultiheadAttention(16, 2, batch_first=True, **options)
        self.proj = nn.Linear(16, 4)
        self.widths = options

    def forward(self, x):
        # The very same tensor three times, where it may be: else there is no fast path.
        key = x[..., : self.widths["kdim"]] if self.widths.get("kdim") else x
        value = x[..., : self.widths["vdim"]] if self.widths.get("vdim") else x
        return self.proj(self.att(x, key, value, need_weights=False)[0]).mean(1)


class Encoder(nn.Module):
    """Its eval fast path hands all weights to one fused kernel."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.proj = nn.Linear(16, 4)

    def forward(self, x):
        return self.proj(self.encoder(x)).mean(1)


NETS = {
    "joint": (Net, {}, ["att.in_proj_weight", "att.out_proj.weight", "proj.weight"]),
    "no_bias": (Net, {"bias": False}, ["att.in_proj_weight", "att.out_proj.weight", "proj.weight"]),
    "separate": (
        Net,
        {"kdim": 8, "vdim": 12},
        ["att.q_proj_weight", "att.k_proj_weight", "att.v_proj_weight", "att.out_proj.weight", "proj.weight"],
    ),
    "encoder": (
        Encoder,
        {},
        [
            f"encoder.layers.{index}.{name}"
            for index in (0, 1)
            for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
        ]
        + ["proj.weight"],
    ),
}


def build(kind):
    torch.manual_seed(0)
    class_, options, _ = NETS[kind]
    return class_(**options), torch.randn(2, 5, 16)


def data():
    g = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(32, 5, 16, generator=g), torch.randint(0, 4, (32,), generator=g)), batch_size=8
    )


def dense_twin(kind, net, masks):
    """A network without any mask whose weights were multiplied by the masks."""
    twin, _ = build(kind)
    twin.load_state_dict(net.state_dict())
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.mul_(masks.get(name, torch.tensor(True)))
    return twin


@pytest.mark.parametrize("kind", NETS)
def test_consecutive_steps_and_eval(kind):
    net, x = build(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    store = prune(net, Magnitude(), 0.5, allocation="layerwise")
    assert list(store.masks) == NETS[kind][2]
    assert store.layer_sparsity() == dict.fromkeys(NETS[kind][2], 0.5)
    for _ in range(3):
        before = kept_values(clone(dict(net.named_parameters())), store.masks)
        optimizer.zero_grad()
        net(x).square().sum().backward()
        store.mask_grads_()
        optimizer.step()
        # Momentum is still empty in masked places: nothing needs to be zeroed after the step.
        assert not masked_values(net, store.masks).any()
        after = kept_values(dict(net.named_parameters()), store.masks)
        assert all(bool((after[name] != before[name]).any()) for name in store.masks)
        twin = dense_twin(kind, net, store.masks)
        assert_same(net(x), twin(x))
        with torch.no_grad():
            assert_same(net.eval()(x), twin.eval()(x))
        net.train()


@pytest.mark.parametrize("kind", NETS)
def test_in_a_training(kind):
    module, _ = build(kind)
    module, checked = Lit(module), []
    x = torch.randn(3, 5, 16)

    def look(trainer, module):
        masks = {name.removeprefix("net."): mask for name, mask in pruner.masks.items()}
        assert not masked_values(module.net, masks).any()
        twin = dense_twin(kind, module.net, masks)
        with torch.no_grad():
            assert_same(module.net.eval()(x), twin.eval()(x))
        module.net.train()
        checked.append(pruner.sparsity)

    pruner = Pruning(Magnitude(), Levels((0.5, 0.75), begin=1), Layerwise())
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=3).fit(module, data())
    assert checked == [0.0] * 3 + [0.5] * 4 + [0.75] * 5


@pytest.mark.parametrize("kind", ["joint", "encoder"])
def test_eval_fast_path_is_taken_and_differs_from_dense(kind, monkeypatch):
    """Else the comparison above would say nothing about it."""
    fused = {"joint": "_native_multi_head_attention", "encoder": "_transformer_encoder_layer_fwd"}[kind]
    calls, original = [], getattr(torch, fused)
    monkeypatch.setattr(torch, fused, lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1])
    net, x = build(kind)
    with torch.no_grad():
        dense = net.eval()(x)
        assert calls
        prune(net, Magnitude(), 0.5)
        assert not torch.equal(net(x), dense)
