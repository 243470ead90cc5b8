"""When events happen in a training, and what they leave."""

import copy
import pickle
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, kept_values, loader, masked_values, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import sparsecomp
from sparsecomp import (
    Geometric,
    Levels,
    LotteryTicketPruning,
    Magnitude,
    MagnitudePruning,
    OneShot,
    Polynomial,
    Pruning,
    PruningEvent,
    Random,
    Rewind,
    Selection,
)


def pruning(schedule, **options):
    return Pruning(Magnitude(), schedule, **options)


def timeline(pruner, *, validate=False, **options):
    """Sparsity seen at the start and end of each training batch, and in each validation."""
    seen = []

    def note(what):
        return lambda trainer, module: seen.append((what, trainer.global_step, len(pruner.events)))

    # It runs before the pruner, so the end of a batch shows what the step itself left.
    watch = Watch(
        on_train_batch_start=note("start"), on_train_batch_end=note("end"), on_validation_batch_start=note("validation")
    )
    running = trainer(watch, pruner, **{"num_sanity_val_steps": 0} | options)
    running.fit(Lit(mlp()), loader(), loader(n=8) if validate else None)
    return seen


# Positions


def test_an_epoch_event_comes_after_the_last_step_and_before_validation():
    pruner = pruning(Levels((0.5, 0.8), begin=1))
    seen = timeline(pruner, validate=True, max_epochs=2)
    assert seen == [
        *[(what, step + (what == "end"), 0) for step in range(4) for what in ("start", "end")],
        ("validation", 4, 1),
        *[(what, step + (what == "end"), 1) for step in range(4, 8) for what in ("start", "end")],
        ("validation", 8, 2),
    ]
    assert [(e.step, e.epoch, e.position) for e in pruner.events] == [(4, 1, 1), (8, 2, 2)]


def test_validation_and_a_monitored_checkpoint_describe_the_pruned_network(tmp_path):
    pruner, nonzero = pruning(Levels((0.5, 0.8), begin=1)), []
    look = Watch(on_validation_epoch_end=lambda _, m: nonzero.append(int(m.net[0].weight.count_nonzero())))
    best = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_top_k=-1)
    lit = Lit(mlp())
    trainer(pruner, look, best, enable_checkpointing=True, max_epochs=3, num_sanity_val_steps=0).fit(
        lit, loader(), loader(n=8)
    )
    for epoch, sparsity in enumerate((0.5, 0.8, 0.8)):
        saved = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        state = saved["callbacks"]["sparsecomp.pruning"]
        removed = sum(int((~mask).sum()) for mask in state["masks"].values())
        assert removed / 640 == sparsity
        assert [event["after"] for event in state["events"]] == [0.5, 0.8][: epoch + 1]
        assert all(saved["state_dict"][name][~mask].count_nonzero() == 0 for name, mask in state["masks"].items())
        assert nonzero[epoch] == int(state["masks"]["net.0.weight"].sum())


def test_position_zero_is_before_the_first_update():
    initial = mlp()
    expected = sparsecomp.prune(initial, Magnitude(), 0.8)
    for unit in ("step", "epoch", "fraction"):
        pruner = pruning(OneShot(0.8, at=0, unit=unit))
        seen = []
        watch = Watch(on_train_batch_start=lambda _, m, seen=seen: seen.append(clone(m.net.state_dict())))
        trainer(watch, pruner, max_epochs=1).fit(Lit(mlp()), loader())
        assert_same(seen[0], clone(initial.state_dict()))
        assert_same(list(pruner.masks.values()), list(expected.masks.values()))
        assert [(e.step, e.epoch, e.position) for e in pruner.events] == [(0, 0, 0)]


@pytest.mark.parametrize(("accumulate", "batch"), [(1, 3), (2, 6), (3, 8)])
def test_steps_are_optimizer_steps_also_when_gradients_accumulate(accumulate, batch):
    """With 4 batches an epoch, accumulating 3 steps after batches 3, 4, 7, 8, ..."""
    pruner = pruning(OneShot(0.8, at={1: 3, 2: 3, 3: 4}[accumulate], unit="step"))
    seen = timeline(pruner, accumulate_grad_batches=accumulate)
    starts = [events for what, _, events in seen if what == "start"]
    assert starts == [0] * batch + [1] * (16 - batch)
    assert pruner.events[0].step == pruner.schedule.at


@pytest.mark.parametrize(
    ("at", "options", "batches"),
    [
        (0.5, {}, 8),
        (0.3125, {}, 5),
        (0.3, {}, 5),
        (0.3125, {"accumulate_grad_batches": 2}, 6),
        (0.0625, {"accumulate_grad_batches": 4}, 4),
        (1.0, {}, 16),
        (0.5, {"limit_train_batches": 2}, 4),
        (0.5, {"max_steps": 10, "max_epochs": -1}, 5),
        (0.5, {"max_steps": 10, "max_epochs": 100}, 5),
        (0.5, {"max_steps": 100, "max_epochs": 2}, 4),
    ],
)
def test_fractions_of_the_training(at, options, batches):
    pruner = pruning(OneShot(0.8, at=at, unit="fraction"))
    seen = timeline(pruner, **options)
    # The event comes after so many batches: it is there when the next one starts, if there is a next one.
    assert [events for what, _, events in seen if what == "end"].count(0) == batches
    assert len(pruner.events) == 1
    assert pruner.events[0].position == at


def test_a_fraction_of_a_training_that_ends_with_the_epoch_reaches_one():
    pruner = pruning(Polynomial(0.9, begin=0.0, end=1.0, every=0.125, unit="fraction"))
    trainer(pruner).fit(Lit(mlp()), loader())
    assert [event.position for event in pruner.events] == [i / 8 for i in range(9)]
    assert [event.step for event in pruner.events] == list(range(0, 17, 2))
    assert pruner.sparsity == 0.9


def test_events_closer_than_batches_are_one():
    pruner = pruning(Levels((0.1, 0.2, 0.3, 0.4), begin=0.01, every=0.01, unit="fraction"))
    trainer(pruner, max_epochs=2).fit(Lit(mlp()), loader())
    assert [(event.position, event.after) for event in pruner.events] == [(0.04, 0.4)]


def test_max_steps_in_the_middle_of_an_epoch():
    by_step, by_epoch = pruning(Levels((0.5, 0.8), begin=3, every=3, unit="step")), pruning(OneShot(0.8, at=2))
    for pruner in (by_step, by_epoch):
        trainer(pruner, max_steps=6, max_epochs=-1).fit(Lit(mlp()), loader())
    assert [(event.step, event.after) for event in by_step.events] == [(3, 0.5), (6, 0.8)]
    assert by_epoch.events == []  # the second epoch was not completed


class Stream(IterableDataset):
    def __iter__(self):
        return iter(loader().dataset)


@pytest.mark.parametrize(("unit", "at", "step"), [("epoch", 2, 8), ("step", 5, 5)])
def test_a_stream_without_a_length(unit, at, step):
    lit, pruner = Lit(mlp()), pruning(OneShot(0.8, at=at, unit=unit))
    trainer(pruner).fit(lit, DataLoader(Stream(), batch_size=8))
    assert [event.step for event in pruner.events] == [step]
    assert masked_values(lit, pruner.masks).count_nonzero() == 0


def test_a_fraction_of_a_stream_is_an_error_that_says_what_to_do():
    lit = Lit(mlp())
    before = clone(lit.state_dict())
    with pytest.raises(ValueError, match=r"`unit`='fraction' counts the share of the training.* or use unit='step'"):
        trainer(pruning(OneShot(0.8, at=0.5, unit="fraction"))).fit(lit, DataLoader(Stream(), batch_size=8))
    assert_same(clone(lit.state_dict()), before)


def test_a_fraction_of_a_stream_with_max_steps_is_known():
    pruner = pruning(OneShot(0.8, at=0.5, unit="fraction"))
    trainer(pruner, max_steps=10, max_epochs=-1).fit(Lit(mlp()), DataLoader(Stream(), batch_size=8))
    assert [event.step for event in pruner.events] == [5]


class TwoOptimizers(Lit):
    """By hand, one optimizer a layer; Lightning counts two steps a batch."""

    def __init__(self):
        super().__init__(mlp())
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net[0].parameters()), torch.optim.SGD(self.net[2].parameters(), 0.1, 0.9)]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("unit", "begin", "every", "steps"),
    [("epoch", 1, 1, [8, 16]), ("step", 3, 2, [4, 6]), ("fraction", 0.25, 0.5, [8, 24])],
)
def test_manual_optimization(unit, begin, every, steps):
    lit, pruner, nonzero = TwoOptimizers(), pruning(Levels((0.5, 0.9), begin=begin, every=every, unit=unit)), []
    watch = Watch(on_train_batch_end=lambda _, m: nonzero.append(int(masked_values(m, pruner.masks).count_nonzero())))
    trainer(watch, pruner).fit(lit, loader())
    assert [event.step for event in pruner.events] == steps
    assert nonzero == [0] * 16
    assert pruner.sparsity == 0.9


# Events


def test_the_record_of_an_event():
    """Two weights of different layers go, picked by hand; then two of the same layer."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[0.1, 5.0], [6.0, 7.0]]))
        net[1].weight.copy_(torch.tensor([[0.2, 0.3], [0.4, 8.0]]))
    pruner = pruning(Levels((0.25, 0.5), begin=0, unit="step"), allocation=sparsecomp.Global(min_keep=0))
    frozen = Lit(net, lambda parameters: torch.optim.SGD(parameters, lr=1e-30))
    trainer(pruner, max_steps=2).fit(frozen, loader(d=2, c=2))
    assert pruner.events == [
        PruningEvent(
            0, "step", 0, 0, 0.25, 0.0, 0.25, {"net.0.weight": (0.0, 0.25), "net.1.weight": (0.0, 0.25)}, False
        ),
        PruningEvent(
            1, "step", 1, 0, 0.5, 0.25, 0.5, {"net.0.weight": (0.25, 0.25), "net.1.weight": (0.25, 0.75)}, False
        ),
    ]
    assert pruner.layer_sparsity == {"net.0.weight": 0.25, "net.1.weight": 0.75}
    assert net[1].weight.tolist() == [[0.0, 0.0], [0.0, 8.0]]
    pruner.events.clear()
    assert len(pruner.events) == 2  # what is handed out is a copy


def test_an_event_that_asks_for_what_is_there_changes_nothing():
    pruner, weights = pruning(Levels((0.5, 0.5), begin=1)), []
    look = Watch(on_train_batch_end=lambda t, m: weights.append(clone([m.state_dict(), t.optimizers[0].state_dict()])))
    late = Watch(on_train_batch_end=lambda t, m: weights.append(clone([m.state_dict(), t.optimizers[0].state_dict()])))
    trainer(look, pruner, late, max_epochs=2).fit(Lit(mlp()), loader())
    assert [(e.before, e.after) for e in pruner.events] == [(0.0, 0.5), (0.5, 0.5)]
    assert_same(weights[-1], weights[-2])  # around the second event
    assert float(weights[7][0]["net.0.weight"].count_nonzero()) < float(weights[6][0]["net.0.weight"].count_nonzero())


def test_the_sparsity_is_logged_each_epoch(tmp_path):
    pruner = pruning(Levels((0.5, 0.8), begin=1, every=2))
    running = trainer(pruner, logger=CSVLogger(tmp_path), log_every_n_steps=1)
    running.fit(Lit(mlp()), loader())
    lines = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("pruning/sparsity")
    assert [float(v) for v in (line.split(",")[column] for line in lines[1:]) if v] == pytest.approx(
        [0.5, 0.5, 0.8, 0.8]
    )
    assert running.callback_metrics["pruning/sparsity"] == torch.tensor(0.8)


def test_units_go_with_their_biases_and_stay_gone():
    lit = Lit(mlp())
    pruner = pruning(OneShot(0.5, at=1), allocation=sparsecomp.Layerwise("unit"))
    trainer(pruner, max_epochs=3).fit(lit, loader())
    gone = ~pruner.masks["net.0.weight"].any(1)
    assert int(gone.sum()) == 16
    assert lit.net[0].weight[gone].count_nonzero() == 0
    assert lit.net[0].bias[gone].count_nonzero() == 0
    assert lit.net[0].bias[~gone].count_nonzero() == 16
    assert pruner.sparsity == 0.5


def test_only_the_selection_is_pruned():
    lit, pruner = Lit(mlp()), pruning(OneShot(0.8, at=1), selection=Selection(exclude=["net.2"]))
    trainer(pruner, max_epochs=2).fit(lit, loader())
    assert list(pruner.masks) == ["net.0.weight"]
    assert lit.net[2].weight.count_nonzero() == 128
    assert int((lit.net[0].weight == 0).sum()) == round(0.8 * 512)


def test_random_pruning_follows_the_seed_of_the_run():
    def masks(seed):
        net = mlp()
        L.seed_everything(seed, verbose=False)
        pruner = Pruning(Random(), Levels((0.3, 0.6), begin=1))
        trainer(pruner, max_epochs=2).fit(Lit(net), loader())
        return clone(pruner.masks)

    assert_same(masks(1), masks(1))
    assert not torch.equal(masks(1)["net.0.weight"], masks(2)["net.0.weight"])


# Several fits


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_a_checkpoint_made_without_a_pruner_catches_up(tmp_path):
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    trainer(saver, enable_checkpointing=True, max_epochs=3).fit(Lit(mlp()), loader())
    lit, pruner, sparsities = Lit(mlp(seed=1)), pruning(Levels((0.3, 0.5, 0.8), begin=1, every=2)), []
    look = Watch(on_train_batch_start=lambda *_: sparsities.append(pruner.sparsity))
    saver = ModelCheckpoint(tmp_path / "resumed", "{epoch}", save_top_k=-1)
    running = trainer(look, pruner, saver, enable_checkpointing=True, max_epochs=5)
    running.fit(lit, loader(), ckpt_path=tmp_path / "epoch=2.ckpt")
    # Events at 1 and 3 are over; the later one of them counts.
    assert [(e.position, e.step, e.after) for e in pruner.events] == [(3, 12, 0.5), (5, 20, 0.8)]
    assert sparsities == [0.5] * 8


def test_a_second_fit_of_the_same_network_goes_on_with_its_masks():
    lit, pruner, seen = Lit(mlp()), pruning(OneShot(0.5, at=1)), []
    trainer(pruner, max_epochs=2).fit(lit, loader())
    first = clone(pruner.masks)
    lit.net[0].weight.data.add_(1.0)
    look = Watch(on_train_batch_start=lambda _, m: seen.append(int(masked_values(m, first).count_nonzero())))
    trainer(look, pruner, max_epochs=2).fit(lit, loader())
    assert_same(clone(pruner.masks), first)
    assert seen == [0] * 8
    assert pruner.sparsity == 0.5


def test_another_network_starts_anew():
    pruner, sparsities = pruning(OneShot(0.5, at=1)), []
    first, second = Lit(mlp()), Lit(mlp(seed=1))
    trainer(pruner, max_epochs=2).fit(first, loader())
    before, masks = clone(first.state_dict()), clone(pruner.masks)
    look = Watch(on_train_batch_start=lambda *_: sparsities.append(pruner.sparsity))
    trainer(look, pruner, max_epochs=2).fit(second, loader())
    assert sparsities == [0.0] * 4 + [0.5] * 4
    assert len(pruner.events) == 1
    assert not torch.equal(pruner.masks["net.0.weight"], masks["net.0.weight"])
    assert_same(clone(first.state_dict()), before)
    assert masked_values(second, pruner.masks).count_nonzero() == 0


def test_it_can_be_pickled_and_copied_after_a_fit():
    pruner = pruning(OneShot(0.5, at=1))
    trainer(pruner, max_epochs=2).fit(Lit(mlp()), loader())
    for twin in (copy.deepcopy(pruner), pickle.loads(pickle.dumps(pruner.state_dict()))):
        state = twin if isinstance(twin, dict) else twin.state_dict()
        assert_same(state, pruner.state_dict())


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (Magnitude, OneShot(0.5, at=1)),
            "`criterion` is what to keep and must be a Criterion.*got the class Magnitude",
        ),
        (
            (Magnitude(), 0.5),
            r"`schedule` is when to prune and must be a Schedule, such as OneShot\(0.9, at=3\); got 0.5",
        ),
    ],
)
def test_wrong_types(arguments, message):
    with pytest.raises(TypeError, match=message):
        Pruning(*arguments)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"allocation": "local"}, ValueError, "`allocation` .* one of 'erk', 'global', 'layerwise'; got 'local'"),
        ({"allocation": sparsecomp.Global}, ValueError, "`allocation` turns scores into masks"),
        ({"selection": "net.*"}, TypeError, "`selection` is what is prunable and must be a Selection"),
        ({"rewind": 3}, TypeError, "`rewind` is what events go back to and must be a Rewind"),
    ],
)
def test_wrong_options(option, error, message):
    with pytest.raises(error, match=message):
        pruning(OneShot(0.5, at=1), **option)


def test_a_falling_schedule_is_refused():
    with pytest.raises(ValueError, match="`schedule` must not fall: what is pruned here never returns"):
        pruning(Levels((0.5, 0.3), begin=1, monotone=False))


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_a_rewind_point_after_the_first_event_is_refused(unit):
    with pytest.raises(ValueError, match=rf"`rewind.at` is the {unit} of the rewind point and .* event at 2; got 3"):
        pruning(OneShot(0.5, at=2, unit=unit), rewind=Rewind(at=3, unit=unit))


def test_a_rewind_point_after_the_first_event_in_another_unit_is_refused_at_the_event(tmp_path):
    lit = Lit(mlp())
    with pytest.raises(ValueError, match=r"the first pruning event, epoch 1, comes before the rewind point, step 6"):
        trainer(pruning(OneShot(0.5, at=1), rewind=Rewind(at=6)), default_root_dir=tmp_path).fit(lit, loader())
    assert lit.net[0].weight.count_nonzero() == 512


def test_two_pruners_in_a_trainer_are_refused():
    with pytest.raises(RuntimeError, match="Found more than one stateful callback of type `MagnitudePruning`"):
        trainer(MagnitudePruning(), MagnitudePruning()).fit(Lit(mlp()), loader())


def test_two_pruners_of_different_classes_in_a_trainer_are_refused():
    """They would share one place in the checkpoint, and the masks of one would be lost."""
    with pytest.raises((RuntimeError, ValueError), match="more than one"):
        trainer(MagnitudePruning(), LotteryTicketPruning()).fit(Lit(mlp()), loader())


class Configured(Lit):
    def configure_callbacks(self):
        return [MagnitudePruning()]


def test_a_pruner_from_configure_callbacks_is_refused():
    with pytest.raises(ValueError, match=r"Configured\.configure_callbacks returns a pruner"):
        trainer().fit(Configured(mlp()), loader())


def test_sharded_strategies_are_refused():
    with pytest.raises(ValueError, match="FSDPStrategy splits parameters over devices, and masks need whole ones"):
        MagnitudePruning().setup(SimpleNamespace(strategy=FSDPStrategy()), Lit(mlp()), "fit")


def test_a_state_of_a_newer_version_is_refused():
    pruner = pruning(OneShot(0.5, at=1))
    with pytest.raises(ValueError, match="has version 2, and this sparsecomp reads up to 1"):
        pruner.load_state_dict({"version": 2, "masks": {}, "events": []})


def test_before_the_first_fit_there_is_nothing():
    pruner = MagnitudePruning()
    assert (dict(pruner.masks), pruner.events, pruner.sparsity, pruner.layer_sparsity) == ({}, [], 0.0, {})
    assert pruner.state_dict() == {}
    with pytest.raises(RuntimeError, match=r"masks exist from the start of `Trainer\.fit` on"):
        pruner.on_before_optimizer_step(None, None, None)


# The named pruners


def test_magnitude_pruning_reaches_90_percent_at_60_percent_of_the_training():
    pruner, sparsities = MagnitudePruning(), []
    lit = Lit(mlp())
    trainer(pruner, Watch(on_train_batch_end=lambda *_: sparsities.append(pruner.sparsity))).fit(lit, loader())
    assert sparsities == sorted(sparsities)
    assert sparsities[8] < 0.9
    assert sparsities[9:] == [0.9] * 7
    assert masked_values(lit, pruner.masks).count_nonzero() == 0


def test_lottery_ticket_pruning_rewinds_to_the_initialisation_in_three_rounds(tmp_path):
    lit, pruner, after = Lit(mlp()), LotteryTicketPruning(), []
    initial = clone(lit.state_dict())
    look = Watch(on_train_batch_end=lambda _, m: after.append(clone([m.state_dict(), pruner.masks])))
    trainer(pruner, look, max_epochs=5, default_root_dir=tmp_path).fit(lit, loader())
    expected = Geometric(0.9, rounds=3, begin=0.2, every=0.2, unit="fraction")
    assert [e.after for e in pruner.events] == [round(expected.sparsity(p) * 640) / 640 for p in (0.2, 0.4, 0.6)]
    assert all(event.rewound for event in pruner.events)
    for state, masks in (after[event.step - 1] for event in pruner.events):
        assert_same(kept_values(state, masks), kept_values(initial, masks))
    assert [event.step for event in pruner.events] == [4, 8, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ticket.safetensors", "trained.safetensors"]
