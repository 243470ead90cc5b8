"""The monitor in real trainings: what it logs, when, and that a training is the same without it."""

import logging
import math
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, mlp, trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparsecomp.metrics
from sparsecomp import MagnitudePruning, OneShot
from sparsecomp.callbacks.compositionality import CompositionalityMonitor
from sparsecomp.data import DigitsDataModule
from sparsecomp.data.function import FunctionDataModule
from sparsecomp.functions import Tree
from sparsecomp.metrics import FVU, DistinctFunctions, EffectiveFanIn, NodeAlignment, Sparsity, functional
from sparsecomp.models import MLP, MaskedModule, SmallConvNet
from sparsecomp.models.cppn import CPPN
from sparsecomp.probe import Probe

GENERAL = {
    "constituent_arity",
    "distinct_functions",
    "effective_fan_in",
    "effective_sparsity",
    "fvu",
    "largest_arity",
    "sparsity",
}
TRUTH = {"node_alignment", "purity", "decodability"}


def logged(trainer_):
    prefix = "compositionality/"
    return {k.removeprefix(prefix): float(v) for k, v in trainer_.callback_metrics.items() if k.startswith(prefix)}


def rows(logger):
    """The rows of a CSV log with the monitor's values, and their epochs."""
    lines = (line.split(",") for line in Path(logger.experiment.metrics_file_path).read_text().splitlines())
    head = next(lines)
    found = [dict(zip(head, line, strict=True)) for line in lines]
    return [row for row in found if any(value for name, value in row.items() if name.startswith("compositionality/"))]


@pytest.mark.parametrize(
    "network", [lambda: MLP(64, 10, hidden=(20, 20)), lambda: SmallConvNet(1, 10, 8)], ids=["mlp", "conv"]
)
def test_digits(network, caplog):
    torch.manual_seed(0)
    pruning = MagnitudePruning(schedule=OneShot(0.8, at=1, unit="epoch"))
    module, fit = (
        MaskedModule(network(), nn.CrossEntropyLoss()),
        trainer(pruning, CompositionalityMonitor(), max_epochs=2),
    )
    with caplog.at_level(logging.INFO):
        fit.fit(module, DigitsDataModule())
    found = logged(fit)
    assert set(found) == GENERAL
    assert math.isnan(found.pop("fvu"))
    assert all(math.isfinite(value) for value in found.values())
    assert found["sparsity"] == pytest.approx(pruning.sparsity)
    assert found["sparsity"] == pytest.approx(0.8, abs=1e-3)
    assert found["effective_sparsity"] == pytest.approx(pruning.effective_sparsity)
    assert 1 < found["effective_fan_in"] < 64
    messages = [record.getMessage() for record in caplog.records]
    assert sum("left out are decodability, node_alignment, purity" in message for message in messages) == 1
    assert sum("compositionality/fvu is NaN: targets must be real" in message for message in messages) == 1


def test_tree():
    torch.manual_seed(0)
    tree, network = Tree(), CPPN(8, 1)
    data = FunctionDataModule(tree, training=512, validation=300)
    fit = trainer(CompositionalityMonitor(), max_epochs=2)
    module = MaskedModule(network, nn.MSELoss())
    fit.fit(module, data)
    found = logged(fit)
    assert set(found) == GENERAL | TRUTH
    assert all(math.isfinite(value) for value in found.values())
    assert (found["constituent_arity"], found["sparsity"], found["purity"], found["decodability"]) == (8, 0, 0, 0)
    # The network has not changed since: everything by hand, from all samples at once.
    (x, y), hidden, h = next(iter(data.val_dataloader())), [], None
    with torch.no_grad():
        h = x
        for layer in network:
            h = layer(h)
            hidden += [h] if not isinstance(layer, nn.Linear) else []
        units, nodes = torch.cat(hidden, 1).double(), tree.node_values(x)[:, :6].double()
        r = torch.corrcoef(torch.cat([units, nodes], 1).T)
        assert found["fvu"] == pytest.approx(float(((y - h) ** 2).sum() / ((y - y.mean()) ** 2).sum()), rel=1e-4)
    assert found["node_alignment"] == pytest.approx(functional.node_alignment(r[72:, :72]), rel=1e-4)
    assert found["distinct_functions"] == functional.distinct_functions(r[:72, :72])


def test_the_mask_of_the_tree_is_pure_and_small():
    torch.manual_seed(0)
    network = MLP(4, 1, hidden=(4, 4), activation=nn.Tanh)
    with torch.no_grad():
        network[1].weight *= torch.kron(torch.eye(2), torch.ones(2, 2))
    data = FunctionDataModule(Tree(depth=2), training=128, validation=100)
    fit = trainer(CompositionalityMonitor(), max_epochs=1)
    fit.fit(MaskedModule(network, nn.MSELoss(), partial(torch.optim.SGD, lr=0.0)), data)
    found = logged(fit)
    assert found["purity"] == 1
    assert found["largest_arity"] == 4
    assert found["constituent_arity"] == 3
    assert found["sparsity"] == pytest.approx(8 / 36)
    assert 0 < found["decodability"] <= 1


def test_the_function_can_be_given():
    data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), batch_size=16)
    fit = trainer(CompositionalityMonitor(function=Tree(depth=2)), max_epochs=1)
    fit.fit(MaskedModule(MLP(4, 1), nn.MSELoss()), data)
    assert set(logged(fit)) == GENERAL | TRUTH
    assert math.isfinite(logged(fit)["node_alignment"])


def test_a_metric_that_lacks_its_ground_truth_is_nan():
    fit = trainer(CompositionalityMonitor([NodeAlignment(), Sparsity()]), max_epochs=1)
    fit.fit(Lit(mlp()), loader())
    assert math.isnan(logged(fit)["node_alignment"])
    assert logged(fit)["sparsity"] == 0


def test_a_network_that_cannot_be_traced():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4)

        def forward(self, x):
            h = self.a(x)
            return self.b(h if h.sum() > 0 else -h)

    fit = trainer(CompositionalityMonitor(), max_epochs=1)
    fit.fit(Lit(Branch()), loader())
    found = logged(fit)
    nan = {name for name, value in found.items() if math.isnan(value)}
    assert nan == {"constituent_arity", "distinct_functions", "effective_sparsity", "fvu", "largest_arity"}
    assert found["effective_fan_in"] > 1


@pytest.mark.parametrize("validated", [True, False])
def test_when_it_logs(validated, tmp_path):
    logger = CSVLogger(tmp_path)
    options = {} if validated else {"limit_val_batches": 0}
    fit = trainer(
        CompositionalityMonitor([Sparsity()], every_n_epochs=3),
        max_epochs=7,
        logger=logger,
        log_every_n_steps=1,
        **options,
    )
    fit.fit(Lit(mlp()), loader(), loader())
    found = rows(logger)
    assert [int(row["epoch"]) for row in found] == [2, 5, 6]
    if validated:
        assert all(row["val_loss"] for row in found)


def test_once_an_epoch_where_validation_runs_often(tmp_path):
    class Counting(Sparsity):
        looks = 0

        def _add(self, batch):
            super()._add(batch)
            Counting.looks += 1

    logger = CSVLogger(tmp_path)
    monitor = CompositionalityMonitor([Counting()], every_n_epochs=1, probe=Probe(1))
    trainer(monitor, max_epochs=3, logger=logger, val_check_interval=0.5).fit(Lit(mlp()), loader(), loader())
    assert Counting.looks == 3
    assert len(rows(logger)) == 3


def test_each_look_starts_anew():
    """The value logged in an epoch is that of this epoch alone."""
    values = []
    monitor = CompositionalityMonitor([FVU()], every_n_epochs=1)
    watcher = Watch(
        on_train_epoch_end=lambda t, m: values.append((logged(t)["fvu"], float(t.callback_metrics["val/loss"])))
    )
    torch.manual_seed(0)
    data = FunctionDataModule(Tree(depth=2), training=128, validation=100)
    trainer(monitor, watcher, max_epochs=4).fit(MaskedModule(MLP(4, 1), nn.MSELoss()), data)
    (y,) = [y for _, y in data.val_dataloader()]
    assert [fvu for fvu, _ in values] == pytest.approx(
        [loss / float(y.var(correction=0)) for _, loss in values], rel=1e-4
    )
    assert len({fvu for fvu, _ in values}) == 4


def test_not_in_validate_test_or_sanity_check():
    monitor = CompositionalityMonitor([Sparsity()])
    fit = trainer(monitor)
    fit.validate(Lit(mlp()), loader(), verbose=False)
    fit.test(Lit(mlp()), loader(), verbose=False)
    assert logged(fit) == {}
    early = []
    watcher = Watch(on_sanity_check_end=lambda t, _: early.append(logged(t)))
    trainer(monitor, watcher, max_epochs=1, num_sanity_val_steps=1).fit(Lit(mlp()), loader(), loader())
    assert early == [{}]


@pytest.mark.parametrize("validated", [True, False])
@pytest.mark.parametrize("own_generator", [True, False])
def test_training_is_the_same_without_it(validated, own_generator):
    def run(*callbacks):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 4))
        generator = torch.Generator().manual_seed(1) if own_generator else None
        data = DataLoader(loader().dataset, batch_size=8, shuffle=True, generator=generator)
        module, seen = Lit(net), []
        watcher = Watch(
            on_train_batch_start=lambda t, m: seen.append([h.training for h in m.modules()]),
            on_train_epoch_end=lambda t, m: seen.append([clone(p.grad) for p in m.parameters()]),
        )
        fit = trainer(*callbacks, watcher, max_epochs=3)
        fit.fit(module, data, loader() if validated else None)
        return dict(module.state_dict()), seen, torch.get_rng_state(), module

    plain, watched = run(), run(CompositionalityMonitor(every_n_epochs=1))
    assert_same(watched[:3], plain[:3])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched[3].modules())
    assert all(m.training for m in watched[3].modules())


def test_a_second_fit_of_another_network():
    monitor = CompositionalityMonitor()
    for hidden in (8, 12):
        fit = trainer(monitor, max_epochs=1)
        fit.fit(Lit(nn.Sequential(nn.Linear(16, hidden), nn.Tanh(), nn.Linear(hidden, 4))), loader(), loader())
        assert logged(fit)["distinct_functions"] <= hidden
        assert logged(fit)["constituent_arity"] == 16


def test_masks_are_the_nonzero_weights_without_a_pruner():
    net = mlp()
    with torch.no_grad():
        net[0].weight[:, :8] = 0
        net[0].weight.requires_grad_(False)
    fit = trainer(CompositionalityMonitor([Sparsity()]), max_epochs=1)
    fit.fit(Lit(net), loader())
    assert logged(fit)["sparsity"] == pytest.approx(256 / (512 + 128))


def test_it_can_be_pickled():
    fit = trainer(pickle.loads(pickle.dumps(CompositionalityMonitor())), max_epochs=1)
    fit.fit(Lit(mlp()), loader(), loader())
    assert set(logged(fit)) == GENERAL


def test_default_metrics_are_all_of_the_package():
    assert {getattr(sparsecomp.metrics, name).label() for name in sparsecomp.metrics.MEMBERS} == GENERAL | TRUTH


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"every_n_epochs": 0}, ValueError, "`every_n_epochs` is the number of epochs .* got 0"),
        ({"every_n_epochs": 1.5}, TypeError, "`every_n_epochs`"),
        ({"metrics": [EffectiveFanIn]}, TypeError, "`metrics` is what to log .* got the class EffectiveFanIn"),
        (
            {"metrics": [Sparsity(), DistinctFunctions(), Sparsity()]},
            ValueError,
            "each metric once; got sparsity, dist",
        ),
        ({"probe": 4}, TypeError, "`probe`"),
        ({"function": "tree"}, TypeError, "`function` is the ground truth .* got 'tree'"),
    ],
)
def test_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        CompositionalityMonitor(**arguments)
