"""A compiled network follows its masks, and no mask value costs a compilation.

https://github.com/pytorch/pytorch/issues/117758
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, mlp, trainer
from torch import nn

from sparsecomp import Levels, LotteryTicketPruning, Magnitude, Pruning, Random, prune


class Counting:
    """The eager backend, which counts the graphs it is given."""

    def __init__(self):
        self.compiled = 0

    def __call__(self, graph, example_inputs):
        self.compiled += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)


@pytest.mark.parametrize("backend", ["eager", "counting"])
def test_compiled_and_run_then_pruned(backend):
    net, x = build()
    counting = Counting()
    compiled = torch.compile(net, backend={"eager": "eager", "counting": counting}[backend])
    dense = compiled(x)
    assert_same(dense, net(x))
    seen = counting.compiled
    store = prune(net, Magnitude(), 0.5)
    for sparsity in (0.5, 0.7, 0.9):
        masks = {name: (w.abs() > w.abs().flatten().quantile(sparsity)) for name, w in store.weights.items()}
        store.update_({name: mask & store.masks[name] for name, mask in masks.items()})
        assert_same(compiled(x), net(x))
        assert not torch.equal(compiled(x), dense)
    assert counting.compiled == seen
    compiled.load_state_dict(torch.compile(build()[0], backend="eager").state_dict())  # masks hold after a load too
    assert_same(compiled(x), net(x))
    assert (net[0].weight == 0).float().mean() > 0.8
    assert counting.compiled == seen


def test_pruned_by_way_of_the_compiled_network():
    net, x = build()
    compiled = torch.compile(net, backend="eager")
    compiled(x)
    store = prune(compiled, Magnitude(), 0.5)
    assert store.sparsity == 0.5
    assert_same(compiled(x), net(x))
    assert int((net[0].weight == 0).sum() + (net[2].weight == 0).sum()) == 96


class Net(nn.Module):
    """A user's own class: `nn.Module.compile` passes over a bare Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x)


class Silent(Lit):
    """Without self.log in the steps: dynamo cannot trace it, or guards on how much was logged."""

    def validation_step(self, batch, _):
        self.net(batch[0])

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


PRUNERS = {
    "none": lambda: None,
    "magnitude": lambda: Pruning(Magnitude(), Levels((0.3, 0.5, 0.7, 0.9), begin=3, every=3, unit="step")),
    "random": lambda: Pruning(Random(), Levels((0.3, 0.5, 0.7), begin=0)),
    "rewind": lambda: LotteryTicketPruning(Levels((0.3, 0.5, 0.7, 0.9), begin=3, every=3, unit="step")),
}


def run(folder, kind, way):
    """Train with a compiled network; returns how many graphs were compiled, and what came out."""
    counting, pruner, outputs = Counting(), PRUNERS[kind](), []
    net, x = Net(), torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    plain = net
    if way == "network":
        net = torch.compile(net, backend=counting)
    if way == "in_place":
        net.compile(backend=counting)
    module = Silent(net)

    def look(trainer, module):
        compiled = module.net(x)
        with torch.compiler.set_stance("force_eager"):
            assert_same(compiled, plain(x))
        outputs.append((compiled.detach(), counting.compiled))

    callbacks = [Watch(on_train_batch_end=look)] if pruner is None else [pruner, Watch(on_train_batch_end=look)]
    fitted = torch.compile(module, backend=counting) if way == "module" else module
    t = trainer(*callbacks, default_root_dir=folder)
    t.fit(fitted, loader(), loader())
    return counting.compiled, outputs, clone(dict(plain.named_parameters())), pruner


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("magnitude", "network"),
        ("magnitude", "in_place"),
        ("magnitude", "module"),
        ("random", "network"),
        ("rewind", "network"),
    ],
)
def test_events_in_a_training_cost_no_compilation(tmp_path, kind, way):
    graphs, outputs, weights, pruner = run(tmp_path, kind, way)
    assert len(pruner.events) >= 3
    assert sum(int((~mask).sum()) for mask in pruner.masks.values()) == round(640 * pruner.schedule.final_sparsity)
    torch._dynamo.reset()
    plain_graphs, plain_outputs, *_ = run(tmp_path, "none", way)
    assert graphs == plain_graphs
    assert [count for _, count in outputs] == [count for _, count in plain_outputs]  # at each step
    assert graphs >= 1
    torch._dynamo.reset()
    with torch.compiler.set_stance("force_eager"):  # the same training without any compilation
        none, eager_outputs, eager_weights, _ = run(tmp_path, kind, way)
    assert none == 0
    assert_same(weights, eager_weights)
    assert_same([out for out, _ in outputs], [out for out, _ in eager_outputs])


def test_pruned_and_then_compiled():
    net, x = build()
    prune(net, Magnitude(), 0.5)
    counting = Counting()
    compiled = torch.compile(net, backend=counting)
    assert_same(compiled(x), net(x))
    assert counting.compiled == 1
