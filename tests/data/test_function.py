"""Samples of a target function: what is drawn, what the seed changes, and a network that learns them."""

import itertools

import pytest
import torch
from helpers import assert_same, trainer
from torch import nn
from torchmetrics.regression import R2Score

from sparsecomp.data import FunctionDataModule
from sparsecomp.functions import Pattern, TargetFunction, Tree
from sparsecomp.models import CPPN, MaskedModule


def ready(**options):
    data = FunctionDataModule(options.pop("function", None) or Tree(depth=2), **options)
    data.setup("fit")
    return data


def parts(data):
    return {
        "train": data.train_dataloader().tensors,
        "val": data.val_dataloader().tensors,
        "test": data.test_dataloader().tensors,
    }


def test_sizes_and_batches():
    data = ready()
    assert {name: len(x) for name, (x, _) in parts(data).items()} == {"train": 12000, "val": 1024, "test": 2048}
    assert (len(data.train_dataloader()), len(data.val_dataloader()), len(data.test_dataloader())) == (94, 1, 1)
    x, y = next(iter(data.train_dataloader()))
    assert (x.shape, y.shape, x.dtype, y.dtype) == ((128, 4), (128, 1), torch.float32, torch.float32)


@pytest.mark.parametrize("function", [Tree(depth=2, distractors=1, permuted=True), Pattern(out_features=3)])
def test_targets_are_the_functions_outputs(function):
    data = ready(function=function, training=50, validation=20, test=30)
    assert data.function is function
    for x, y in parts(data).values():
        assert_same(y, function(x))
        assert y.shape == (len(x), function.out_features)


def test_the_seed_orders_and_does_not_draw():
    first, same, other = (ready(training=300, batch_size=300, seed=seed) for seed in (1, 1, 2))
    assert_same(parts(first), parts(other))
    orders = [next(iter(data.train_dataloader()))[0] for data in (first, same, other)]
    assert_same(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])
    assert_same(orders[0].sort(dim=0).values, orders[2].sort(dim=0).values)


def test_seed_none_is_the_runs():
    torch.manual_seed(5)
    data = ready(training=300, batch_size=300)
    assert_same(
        next(iter(data.train_dataloader())), next(iter(ready(training=300, batch_size=300, seed=5).train_dataloader()))
    )
    before = torch.get_rng_state()
    ready(training=300)
    assert_same(torch.get_rng_state(), before)


def test_sets_are_drawn_apart():
    small, large = parts(ready(training=100)), parts(ready(training=200, validation=512))
    assert_same(small["test"], large["test"])
    rows = [{tuple(row) for row in x.tolist()} for x, _ in large.values()]
    assert [len(row) for row in rows] == [200, 512, 2048]
    assert all(not a & b for a, b in itertools.combinations(rows, 2))


def test_setup_draws_once():
    data = ready(training=100)
    before = data.train_dataloader()
    data.setup("test")
    assert data.train_dataloader() is before


def test_no_validation():
    assert ready(validation=0).val_dataloader() == []


def test_wrong_arguments():
    for name, minimum in {"training": 1, "validation": 0, "test": 1, "batch_size": 1, "seed": 0}.items():
        with pytest.raises(ValueError, match=f"`{name}` is .* integer >= {minimum}; got {minimum - 1}"):
            FunctionDataModule(Tree(depth=1), **{name: minimum - 1})
    with pytest.raises(TypeError, match=r"`function` is what is to be learned .* such as Tree\(\); got the class Tree"):
        FunctionDataModule(Tree)


class Linear(TargetFunction):
    """A user's target, of a graph that is made by hand."""

    def __init__(self):
        import networkx as nx

        from sparsecomp.functions.graph import add_input, add_node

        graph = nx.DiGraph()
        for name in ("a", "b"):
            add_input(graph, name)
        add_node(graph, "o", "identity", ("a", "b"), (0.6, -0.8))
        super().__init__(graph, ("o",))

    def sample_inputs(self, n, generator):
        return torch.randn(n, 2, generator=generator)


def test_a_network_learns_a_users_function():
    data = FunctionDataModule(Linear(), training=640, validation=64, test=100, batch_size=64, seed=0)
    torch.manual_seed(0)
    network = nn.Linear(2, 1)
    module = MaskedModule(network, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), metrics={"r2": R2Score()})
    fit = trainer(max_epochs=10)
    fit.fit(module, data)
    (result,) = fit.test(module, data, verbose=False)
    assert result["test/r2"] == pytest.approx(1.0, abs=1e-4)
    assert network.weight.tolist() == [pytest.approx([0.6, -0.8], abs=1e-2)]


def test_a_cppn_learns_a_tree():
    data = FunctionDataModule(Tree(depth=1, seed=0), training=2000, validation=64, test=500, batch_size=100, seed=0)
    torch.manual_seed(1)
    module = MaskedModule(
        CPPN(2, 1, depth=1), nn.MSELoss(), lambda p: torch.optim.Adam(p, lr=0.01), metrics={"r2": R2Score()}
    )
    fit = trainer(max_epochs=10)
    (untrained,) = fit.test(module, data, verbose=False)
    fit.fit(module, data)
    (result,) = fit.test(module, data, verbose=False)
    assert untrained["test/r2"] < 0.5
    assert result["test/r2"] > 0.98
