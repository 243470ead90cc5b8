"""SP-H through real trainings: the tree, the layout, the rewind, and what is refused."""

import csv
import json
import math

import pytest
import torch
import torch.distributed as dist
import wandb
from helpers import Watch, assert_same, clone, masked_values, on_two_ranks, trainer
from lightning import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from torch import nn

from sparsecomp import HierarchicalSimilarityPruning, Levels, Magnitude, OneShot, Probe, Pruning, Rewind
from sparsecomp.data import TensorBatches
from sparsecomp.functional.hierarchy import InputTree
from sparsecomp.input_derivatives import input_derivatives


class Regression(LightningModule):
    """A user's regression."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def network(activation=nn.Tanh, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), activation(), nn.Linear(12, 12), activation(), nn.Linear(12, outputs))


def data(outputs=1):
    """sin(a b) + (c + d)^2 a b; the last input is constant."""
    x = torch.rand(256, 5, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[:, 4] = 0.5
    y = torch.sin(2 * x[:, :1] * x[:, 1:2]) * (1 + x[:, 2:3] * x[:, 3:4])
    return TensorBatches(x, y.expand(-1, outputs), batch_size=32, shuffle=True)


def pruner(**options):
    schedule = Levels((0.6, 0.7, 0.8), begin=4, every=1)
    return HierarchicalSimilarityPruning(schedule, layout_at=3, rewind=Rewind(at=1, unit="epoch"), **options)


@pytest.mark.parametrize("outputs", [1, 2])
def test_derivatives_equal_those_of_autograd(outputs):
    net, (x, _) = network(outputs=outputs).double(), next(iter(data()))
    x = x.double()
    found = input_derivatives(net, [x[:20], x[20:]], Probe(), samples=30)
    first = torch.stack([torch.autograd.functional.jacobian(net, row) for row in x[:30]])
    variance = x[:30].var(0, correction=0)
    torch.testing.assert_close(found.effects, first.square().sum(1).mean(0) * variance)
    second = torch.stack(
        [
            torch.stack([torch.autograd.functional.hessian(lambda r, o=o: net(r)[o], row) for o in range(outputs)])
            for row in x[:30]
        ]
    )
    scaled = second * first.unsqueeze(3) * 1.0  # f_ac f_a
    cross = torch.einsum("noac,nobc->abc", scaled, scaled)
    scale = variance[:, None, None] * variance[:, None] * variance
    torch.testing.assert_close(found.sums.cross, cross * scale)
    assert found.samples == 30
    assert found.effects[4] == 0
    assert found.relevant() == [0, 1, 2, 3]


@pytest.mark.parametrize("target", ["nominal", "effective"])
def test_a_training(tmp_path, target):
    early = {}

    def look(trainer, module):
        if trainer.current_epoch == 0 and trainer.is_last_batch:
            early.update(clone(dict(module.named_parameters())))

    begun = {}

    def start(trainer, module):
        if trainer.current_epoch == 3:
            begun.update(clone(dict(module.named_parameters())))

    method, module = pruner(target=target), Regression(network())
    watch = Watch(on_train_batch_end=look, on_train_epoch_start=start)
    trainer(method, watch, max_epochs=8, default_root_dir=tmp_path).fit(module, data())
    assert [event.rewound for event in method.events] == [True, False, False, False]
    assert method.tree.dropped == (4,)
    assert method.tree.levels[-1] == ((0, 1, 2, 3),)
    assert method.sparsity >= 0.79
    assert not masked_values(module, method.masks).any()
    assert not method.masks["net.0.weight"][:, 4].any()
    for name, mask in method.masks.items():  # kept weights began again at the early ones
        assert_same(begun[name][mask], early[name][mask])
    record = json.loads((tmp_path / "tree.json").read_text())
    assert InputTree.from_record(record).levels == method.tree.levels
    assert (tmp_path / "tree.png").stat().st_size > 1000
    assert method.events[0].seconds.keys() == {"statistics"}
    assert {"scores", "refit", "statistics"} <= method.events[1].seconds.keys()


@pytest.mark.parametrize("layout_at", [0, 3])
def test_the_tree_goes_to_the_loggers(tmp_path, monkeypatch, layout_at):
    monkeypatch.setenv("WANDB_SILENT", "true")
    schedule = Levels((0.6,), begin=4, every=1)
    method = HierarchicalSimilarityPruning(schedule, layout_at=layout_at)
    loggers = [CSVLogger(tmp_path, "csv"), WandbLogger("run", tmp_path, offline=True)]
    t = trainer(method, max_epochs=4, default_root_dir=tmp_path, logger=loggers)
    t.fit(Regression(network()), data())
    wandb.finish()
    (picture,) = tmp_path.rglob("media/images/pruning/tree*.png")
    assert picture.read_bytes() == (tmp_path / "csv" / "version_0" / "tree.png").read_bytes()
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        logged = [row["pruning/tree_level_1"] for row in csv.DictReader(file)]
    assert [float(value) for value in logged if value] == [pytest.approx(method.tree.mean_similarity[0])]
    assert math.isnan(method.tree.mean_similarity[-1])  # no input is left outside to tell by, and nothing is logged


def test_the_tree_is_in_the_checkpoint(tmp_path):
    whole, module = pruner(), Regression(network())
    trainer(whole, max_epochs=8, default_root_dir=tmp_path).fit(module, data())
    first, half = pruner(), Regression(network())
    t = trainer(first, max_epochs=4, default_root_dir=tmp_path)
    t.fit(half, data())
    t.save_checkpoint(tmp_path / "run.ckpt")
    rest, resumed = pruner(), Regression(network())
    trainer(rest, max_epochs=8, default_root_dir=tmp_path).fit(resumed, data(), ckpt_path=tmp_path / "run.ckpt")
    assert rest.tree.levels == whole.tree.levels
    assert len(rest.events) == 4
    assert_same(dict(rest.masks), dict(whole.masks))
    assert_same(clone(resumed.state_dict()), clone(module.state_dict()))


class Relu(nn.Module):
    def forward(self, x):
        return torch.relu(x)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.out = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x):
        x = x + torch.tanh(self.one(x))
        return self.out(x + torch.tanh(self.two(x)))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: network(nn.ReLU), r"net\.1 \(ReLU\) .* no second derivatives"),
        (lambda: network(Relu), "Regression has no second derivatives"),
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), "at least two hidden layers"),
        (Residual, "must be a chain of fully connected layers"),
        (lambda: nn.Sequential(nn.Linear(5, 1)), "it has no hidden layer"),
        (
            lambda: nn.Sequential(nn.Linear(5, 1), nn.Tanh(), nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)),
            "for each of the 2",
        ),
    ],
)
def test_what_is_out_of_scope_is_refused_before_it_trains(net, message):
    module, method = Regression(net()), pruner()
    before = clone(module.state_dict())
    with pytest.raises(ValueError, match=message):
        trainer(method, max_epochs=8).fit(module, data())
    assert_same(clone(module.state_dict()), before)


def test_places_are_in_order():
    with pytest.raises(ValueError, match="`layout_at`"):
        HierarchicalSimilarityPruning(layout_at=0.6)
    with pytest.raises(ValueError, match=r"`rewind\.at`"):
        HierarchicalSimilarityPruning(Levels((0.5,), begin=4, every=1), layout_at=2, rewind=Rewind(at=3, unit="epoch"))


@pytest.mark.parametrize(("until", "second"), [(0.5, 0.0), (0.9, 0.5)])
def test_l1_is_the_gradient_of_the_penalty_until_its_sparsity(until, second):
    """Two SGD steps with an event to 0.8 between them, against the steps that are written by hand."""

    class Sgd(Regression):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module, by_hand = Sgd(network()), network()
    method = Pruning(Magnitude(), OneShot(0.8, at=1, unit="step"), l1=0.5, l1_until=until)
    trainer(method, max_steps=2, max_epochs=1).fit(module, data())
    for l1, (x, y) in zip((0.5, second), data(), strict=False):
        nn.functional.mse_loss(by_hand(x), y).backward()
        with torch.no_grad():
            for name, weight in by_hand.named_parameters():
                mask = method.masks.get(f"net.{name}")  # biases are not selected
                weight.sub_(0.1 * (weight.grad + (0.0 if mask is None else l1 * weight.sign())))
                if mask is not None:  # the event after the first step
                    weight.mul_(mask)
                weight.grad = None
    for name, weight in by_hand.named_parameters():
        torch.testing.assert_close(module.net.get_parameter(name), weight)


@pytest.mark.parametrize("option", [{"l1": -1.0}, {"l1_until": 0.0}, {"l1_until": 1.5}])
def test_l1_options_are_checked(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        Pruning(Magnitude(), OneShot(0.8, at=1), **option)


def test_a_tree_that_contradicts_itself_is_said(monkeypatch, tmp_path):
    from sparsecomp.callbacks import hierarchical_similarity_pruning as at

    nan = float("nan")
    levels = (((0, 1), (2, 3)), ((0, 1, 2, 3),))
    tree = InputTree(levels, ({(0, 1): 0.1, (2, 3): 0.2}, {(0, 1, 2, 3): nan}), (0.7, nan), (4,))
    monkeypatch.setattr(at, "infer_levels", lambda sums, inputs: tree)
    method = pruner()
    with pytest.warns(UserWarning, match=r"(?s)No tree shows.*\.70 on average"):
        trainer(method, max_epochs=4, default_root_dir=tmp_path).fit(Regression(network()), data())
    assert method.tree.contradicted
    assert not method.masks["net.0.weight"].all()  # the layout follows all the same


def test_inputs_of_the_probe_must_be_those_of_the_chain():
    class Fewer(Probe):
        def inputs(self, batch):
            return batch[0][:, :4]

        def outputs(self, module, inputs, batch):
            return module(torch.nn.functional.pad(inputs, (0, 1)))

    with pytest.raises(ValueError, match=r"must read the 4 inputs of the network; it reads 5"):
        trainer(pruner(probe=Fewer()), max_epochs=8).fit(Regression(network()), data())


def test_seconds_of_inner_parts_do_not_count_twice(monkeypatch):
    from sparsecomp import _stopwatch

    ticks = iter([0.0, 1.0, 4.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr(_stopwatch, "_now", lambda: next(ticks))
    watch = _stopwatch.Stopwatch()
    with watch("scores"), watch("statistics"):
        pass
    with watch("scores"):
        pass
    assert watch.seconds == {"statistics": 3.0, "scores": 8.0}


def test_resumes_in_the_middle_of_an_epoch(tmp_path):
    def run(ckpt=None):
        method, module = pruner(), Regression(network())
        keep = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
        options = {"max_epochs": 8, "default_root_dir": tmp_path, "enable_checkpointing": True}
        trainer(method, keep, **options).fit(module, data(), ckpt_path=ckpt)
        return method, module

    whole, module = run()
    for step in (20, 28):  # the layout is due after step 24
        rest, resumed = run(tmp_path / f"step={step}.ckpt")
        assert rest.tree.to_record() == whole.tree.to_record()
        assert_same(dict(rest.masks), dict(whole.masks))
        assert_same(clone(resumed.state_dict()), clone(module.state_dict()))


def test_what_another_pruner_dropped_stays_dropped(tmp_path):
    first, module = Pruning(Magnitude(), OneShot(0.3, at=1), rewind=Rewind()), Regression(network())
    t = trainer(first, max_epochs=2, default_root_dir=tmp_path)
    t.fit(module, data())
    t.save_checkpoint(tmp_path / "run.ckpt")
    rest = HierarchicalSimilarityPruning(Levels((0.8,), begin=4, every=1), layout_at=3)
    t = trainer(rest, max_epochs=4, default_root_dir=tmp_path)
    t.fit(Regression(network()), data(), ckpt_path=tmp_path / "run.ckpt")
    assert rest.tree is not None
    assert not any((rest.masks[name] & ~mask).any() for name, mask in first.masks.items())


def test_layers_must_be_wide_enough_for_fewer_inputs_too():
    """9 inputs have 4 levels, the second in layer 1 of 3: 3 clusters. 8 have 3, the first in layer 1: 4 clusters."""
    hidden = [layer for _ in range(2) for layer in (nn.Tanh(), nn.Linear(3, 3))]
    net = nn.Sequential(nn.Linear(9, 3), *hidden, nn.Tanh(), nn.Linear(3, 1))
    batches = TensorBatches(torch.randn(32, 9), torch.randn(32, 1), batch_size=8)
    with pytest.raises(ValueError, match="for each of the 4 clusters"):
        trainer(pruner(), max_epochs=1).fit(Regression(net), batches)  # ends before the layout


def test_a_dev_run_infers_the_tree_once_and_keeps_nothing(monkeypatch):
    from sparsecomp.callbacks import hierarchical_similarity_pruning as at

    calls = []
    infer = at.infer_levels
    monkeypatch.setattr(at, "infer_levels", lambda *sums: (calls.append(1), infer(*sums))[1])
    method, module = HierarchicalSimilarityPruning(Levels((0.6,), begin=4, every=1), layout_at=0), Regression(network())
    trainer(method, fast_dev_run=3).fit(module, data())
    assert len(calls) == 1
    assert method.tree is None


def derivatives_of_a_rank(folder, rank):
    """Where each rank sees half of the data."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        return derived(slice(rank, None, 2))
    finally:
        dist.destroy_process_group()


def derived(part):
    x = data().tensors[0][:64].double()
    found = input_derivatives(network().double(), [x[part]], Probe(), samples=60)
    return {"effects": found.effects, "cross": found.sums.cross, "square": found.sums.square, "samples": found.samples}


def test_two_ranks_share_the_samples_and_find_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ours, theirs = on_two_ranks(derivatives_of_a_rank, tmp_path)
    alone = derived(slice(None))
    assert_same(ours, theirs)
    assert ours.pop("samples") == alone.pop("samples") == 60  # every other of 64: the first 30 of each are the first 60
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)
