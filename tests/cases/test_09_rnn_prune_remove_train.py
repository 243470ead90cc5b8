"""Masks on recurrent weights, held and let go. https://github.com/pytorch/pytorch/issues/33618"""

import copy
import itertools

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, kept_values, masked_values, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sparsecomp import Magnitude, OneShot, Pruning, prune

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
SHAPES = {"one": {}, "deep": {"num_layers": 2, "bidirectional": True}, "no_bias": {"bias": False}}
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.rnn = kind(6, 8, batch_first=True, **options)
        self.fc = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x):
        return self.fc(self.rnn(x)[0].mean(1))


def build(kind, shape="one", seed=0):
    torch.manual_seed(seed)
    return Net(kind, **SHAPES[shape]), torch.randn(4, 5, 6)


def data():
    g = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(32, 5, 6, generator=g), torch.randint(0, 3, (32,), generator=g)), batch_size=8
    )


def step(net, x, optimizer, store=None):
    optimizer.zero_grad()
    net(x).square().sum().backward()
    if store is not None:
        store.mask_grads_()
    optimizer.step()
    if store is not None:
        store.apply_()


def least_moved(before, after):
    """Share of entries that differ, in the parameter where it is smallest; rounding may stop single weights."""
    return min(float((after[name] != before[name]).float().mean()) for name in before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_all_recurrent_matrices_are_selected(kind, shape):
    net, _ = build(kind, shape)
    expected = [name for name, _ in net.named_parameters() if "weight_ih" in name or "weight_hh" in name]
    assert len(expected) == {"one": 2, "deep": 8, "no_bias": 2}[shape]
    store = prune(net, Magnitude(), 0.5, allocation="layerwise")
    assert list(store.masks) == [*expected, "fc.weight"]
    assert store.masks["rnn.weight_hh_l0"].shape == (GATES[kind] * 8, 8)
    assert store.layer_sparsity() == dict.fromkeys(store.masks, 0.5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_forward_uses_the_masked_matrices(kind, shape):
    net, x = build(kind, shape)
    net(x)  # whatever a forward pass may remember, it is from before the masks
    store = prune(net, Magnitude(), 0.5)
    reference, _ = build(kind, shape)
    dense = reference(x)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.mul_(store.masks.get(name, torch.tensor(True)))
    assert_same(net(x), reference(x))
    assert not torch.equal(net(x), dense)
    assert all(
        flat is getattr(net.rnn, name)
        for flat, name in zip(net.rnn._flat_weights, net.rnn._flat_weights_names, strict=True)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_masked_entries_never_move_and_live_ones_do_until_masks_are_let_go(kind, shape):
    net, x = build(kind, shape)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    step(net, x, optimizer)
    store = prune(net, Magnitude(), 0.5)
    store.zero_optimizer_state_([optimizer])
    masks = clone(store.masks)
    for _ in range(4):
        before = kept_values(clone(dict(net.named_parameters())), masks)
        step(net, x, optimizer, store)
        assert not masked_values(net, masks).any()
        after = kept_values(dict(net.named_parameters()), masks)
        assert least_moved(before, after) > 0.95
    # Finalised: the sparse weights are the network's own, and training goes on, for all of them.
    x_before = net(x)
    store.detach()
    assert_same(net(x), x_before)
    sparse = clone(dict(net.named_parameters()))
    step(net, x, optimizer)
    assert all(isinstance(getattr(net.rnn, name), nn.Parameter) for name in net.rnn._flat_weights_names)
    assert least_moved(sparse, dict(net.named_parameters())) > 0.95


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_training_and_in_one_after_it(kind, shape):
    module, seen = Lit(build(kind, shape)[0]), []

    def look(trainer, module):
        assert not masked_values(module, pruner.masks).any()
        seen.append(clone(dict(module.named_parameters())))

    pruner = Pruning(Magnitude(), OneShot(0.5, at=1))
    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=3).fit(module, data())
    assert pruner.sparsity == 0.5
    for before, after in itertools.pairwise(seen[3:]):
        assert least_moved(kept_values(before, pruner.masks), kept_values(after, pruner.masks)) > 0.95
    sparse = clone(dict(module.named_parameters()))
    twin = copy.deepcopy(module.net)
    x = torch.randn(4, 5, 6)
    assert_same(twin(x), module.net(x))
    trainer(max_epochs=1).fit(module, data())  # no pruner: everything trains again
    assert least_moved(sparse, dict(module.named_parameters())) > 0.95
    assert (masked_values(module, pruner.masks) != 0).float().mean() > 0.95
