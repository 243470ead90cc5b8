"""Global pruning empties no layer: the output still depends on the input.

https://github.com/VainF/Torch-Pruning/issues/8
"""

import copy

import pytest
import torch
from helpers import Lit, loader, trainer
from torch import nn

from sparsecomp import ERK, Global, Layerwise, Levels, LotteryTicketPruning, Magnitude, OneShot, Pruning, Random, prune


def build(seed=0, place=2, scale=1e-3):
    """One layer of a small scale: what a global threshold by magnitude empties."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        net[place].weight.mul_(scale)
    return net.eval(), torch.randn(256, 16)


def path_is_left(store):
    """Whether some input reaches some output over kept weights."""
    first, second, third = (mask.float() for name, mask in store.masks.items() if name.endswith("weight"))
    return bool((third @ second @ first).any())


def depends_on_input(net, x):
    """By the gradient in double precision, so that a small layer is not lost in rounding."""
    x = x.double().requires_grad_()
    net.double()(x).square().sum().backward()
    return bool(x.grad.any())


def dependent(seeds, criterion, sparsity, allocation="global", **options):
    """The seeds after whose pruning the output depends on the input."""
    left = []
    for seed in seeds:
        net, x = build(seed, **options)
        assert depends_on_input(net, x)  # the dense network does
        net.float()
        prune(net, criterion, sparsity, allocation=allocation)
        left += [seed] * depends_on_input(net, x)
    return left


@pytest.mark.parametrize("granularity", ["weight", "unit"])
@pytest.mark.parametrize("make", [Global, Layerwise, ERK])
@pytest.mark.parametrize("criterion", [Magnitude(), Random()])
@pytest.mark.parametrize("sparsity", [0.5, 0.95, 0.999])
def test_no_layer_loses_everything(sparsity, criterion, make, granularity):
    for place in (0, 2, 4):
        for seed in range(4):
            net, _ = build(seed, place, 1e-6)
            store = prune(net, criterion, sparsity, allocation=make(granularity))
            assert all(mask.any() for mask in store.masks.values())
            assert all(net[at].weight.any() for at in (0, 2, 4))


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_output_depends_on_input(sparsity, place):
    assert dependent(range(12), Magnitude(), sparsity, place=place) == list(range(12))


def test_output_depends_on_input_at_95_percent():
    """The reported network, of other seeds too."""
    assert dependent(range(12), Magnitude(), 0.95) == list(range(12))


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_path_is_left_at_95_percent(place):
    """83 of 1,664 weights are kept; without the guard no network has a path.

    A path is all that an allocation can see to: where a scaled layer leaves its ReLU units to their biases, half of the
    dense ones are off already, and those of the path may be among them.
    """
    nets = [build(seed, place)[0] for seed in range(40)]
    without = [
        path_is_left(prune(copy.deepcopy(net), Magnitude(), 0.95, allocation=Global(min_keep=0))) for net in nets
    ]
    guarded = [path_is_left(prune(net, Magnitude(), 0.95)) for net in nets]
    assert without == [False] * 40
    assert guarded == [True] * 40


@pytest.mark.parametrize("make", [Global, Layerwise, ERK])
@pytest.mark.parametrize("criterion", [Magnitude(), Random()])
def test_a_path_is_left_when_units_go(criterion, make):
    nets = [build(seed)[0] for seed in range(20)]
    assert [path_is_left(prune(net, criterion, 0.95, allocation=make("unit"))) for net in nets] == [True] * 20


@pytest.mark.parametrize("make", [Global, Layerwise, ERK])
def test_the_total_stays_exact(make):
    net, _ = build()
    assert prune(net, Magnitude(), 0.95, allocation=make()).sparsity == 1581 / 1664


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pruning(Magnitude(), Levels((0.5, 0.8, 0.95), begin=1)),
        lambda: Pruning(Magnitude(), OneShot(0.95, at=0)),
        lambda: LotteryTicketPruning(Levels((0.5, 0.8, 0.95), begin=1)),
    ],
)
def test_in_a_training(tmp_path, make):
    net, _ = build()
    pruner = make()
    trainer(pruner, default_root_dir=tmp_path).fit(Lit(net), loader())
    assert pruner.sparsity == 1581 / 1664
    assert all(mask.any() for mask in pruner.masks.values())
    assert (pruner.effective_sparsity < 1.0) is True


def test_the_guard_says_where_it_acted(caplog):
    net, _ = build()
    store = prune(net, Magnitude(), 0.95)
    (line,) = [record.getMessage() for record in caplog.records if "min_keep" in record.getMessage()]
    assert f"2.weight keeps {int(store.masks['2.weight'].sum())}" in line


def test_without_the_guard_it_collapses():
    """The danger is real: the default is what protects."""
    net, x = build()
    store = prune(net, Magnitude(), 0.9, allocation=Global(min_keep=0))
    assert not store.masks["2.weight"].any()
    assert not depends_on_input(net, x)
