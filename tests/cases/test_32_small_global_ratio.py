"""Nothing to prune is a clean no-op. https://github.com/VainF/Torch-Pruning/issues/204"""

import logging

import pytest
import torch
from helpers import Lit, assert_same, clone, loader, trainer
from torch import nn

from sparsecomp import ERK, Global, Layerwise, Levels, Linear, Magnitude, OneShot, Pruning, Random, Selection, prune

ALLOCATIONS = [make(granularity) for make in (Global, Layerwise, ERK) for granularity in ("weight", "unit")]


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), torch.randn(2, 8)


@pytest.mark.parametrize("criterion", [Magnitude(), Random(0)])
@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
@pytest.mark.parametrize("ratio", [0.0, 1e-12, 0.007])
def test_a_ratio_that_rounds_to_nothing_changes_nothing(ratio, allocation, criterion):
    net, x = build()
    before, out = clone(net.state_dict()), net(x)
    store = prune(net, criterion, ratio, allocation=allocation)
    assert store.sparsity == 0.0
    assert all(mask.all() for mask in store.masks.values())
    assert_same(clone(net.state_dict()), before)
    assert_same(net(x), out)


@pytest.mark.parametrize(("ratio", "weights"), [(0.01, 1), (0.1, 7)])
@pytest.mark.parametrize("make", [Global, Layerwise, ERK])
def test_small_ratios_are_exact(make, ratio, weights):
    net, _ = build()
    store = prune(net, Magnitude(), ratio, allocation=make())
    assert sum(pruned for pruned, _ in store.counts().values()) == weights
    assert sum(int((net[place].weight == 0).sum()) for place in (0, 2)) == weights


@pytest.mark.parametrize(("ratio", "weights"), [(0.01, 0), (0.04, 0), (0.1, 8)])
def test_small_ratios_of_units_are_the_nearest(ratio, weights):
    """Units are rows of 8 and of 6 weights; the lowest row here has 8."""
    net, _ = build()
    with torch.no_grad():
        net[0].weight[2].mul_(1e-3)
    store = prune(net, Magnitude(), ratio, allocation=Global("unit"))
    assert sum(pruned for pruned, _ in store.counts().values()) == weights


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
def test_a_training_that_prunes_nothing_says_so(allocation, caplog):
    net = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))
    module = Lit(net)
    pruner = Pruning(Magnitude(), OneShot(0.0, at=1), allocation)
    with caplog.at_level(logging.INFO):
        trainer(pruner, max_epochs=2).fit(module, loader())
    assert [(e.before, e.after) for e in pruner.events] == [(0.0, 0.0)]
    assert pruner.sparsity == 0.0
    assert "Pruning at epoch 1 (step 4): sparsity stays at 0.0000." in caplog.text


def test_such_a_training_is_the_dense_one():
    def run(*pruners):
        torch.manual_seed(0)
        module = Lit(nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4)))
        trainer(*pruners, max_epochs=3).fit(module, loader())
        return module.state_dict()

    assert_same(run(Pruning(Magnitude(), Levels((0.0, 0.0), begin=1))), run())


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
def test_steps_past_the_end_are_no_ops(allocation, caplog):
    module = Lit(nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4)))
    pruner = Pruning(Magnitude(), Linear(0.5, begin=1, end=2), allocation)
    trainer(pruner, max_epochs=2).fit(module, loader())
    masks, sparsity = clone(pruner.masks), pruner.sparsity
    assert sparsity > 0.3
    with caplog.at_level(logging.INFO):
        trainer(pruner, max_epochs=4).fit(module, loader())
    assert_same(dict(pruner.masks), masks)
    assert pruner.sparsity == sparsity
    assert "sparsity stays at" in caplog.text


@pytest.mark.parametrize("allocation", ALLOCATIONS, ids=repr)
def test_an_allocation_without_room_is_a_no_op(allocation):
    """All is pruned already, or every layer is at its minimum: there is no unit left to look for."""
    empty = {"a": torch.zeros(6, 8, dtype=torch.bool), "b": torch.zeros(3, 6, dtype=torch.bool)}
    scores = {name: torch.rand(mask.shape) for name, mask in empty.items()}
    assert_same(allocation(scores, 0.5, empty), empty)
    full = {name: ~mask for name, mask in empty.items()}
    guarded = type(allocation)(allocation.granularity, min_keep=1000)
    assert_same(guarded(scores, 0.5, full), full)


def test_an_empty_target_list_is_an_error():
    """Not torch's about empty lists: an empty selection is a mistake, and the message says what to do."""
    with pytest.raises(ValueError, match="`include` names the parameters to prune and must not be empty; leave it out"):
        Selection(include=[])
    net, x = build()
    out = net(x)
    with pytest.raises(ValueError, match="leaves nothing to prune in Sequential"):
        prune(net, Magnitude(), 0.5, selection=Selection(exclude=["*"]))
    assert_same(net(x), out)
