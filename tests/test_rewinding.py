"""What a rewind puts back, and what it leaves."""

import logging

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, kept_values, loader, masked_values, mlp, trainer
from torch import nn
from torch.optim import lr_scheduler

from sparsecomp import Levels, Magnitude, OneShot, Pruning, Rewind, load_ticket
from sparsecomp.rewinding import Snapshot

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}
SCHEDULERS = {
    "none": None,
    "step_per_epoch": lambda o: {"scheduler": lr_scheduler.StepLR(o, 1, 0.5), "interval": "epoch"},
    "cosine_per_step": lambda o: {"scheduler": lr_scheduler.CosineAnnealingLR(o, 40), "interval": "step"},
    "one_cycle": lambda o: {"scheduler": lr_scheduler.OneCycleLR(o, 0.2, total_steps=60), "interval": "step"},
}


def state_of(trainer, module):
    optimizer = trainer.optimizers[0].state_dict()
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return clone(
        {
            "module": module.state_dict(),
            "state": optimizer["state"],
            "groups": optimizer["param_groups"],
            "schedulers": schedulers,
        }
    )


def run(rewind, schedule, folder, optimizer="sgd", scheduler="none", **options):
    """A training whose state is recorded before the first step, and around the pruner after each batch."""
    lit = Lit(mlp(norm=True), OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    pruner = Pruning(Magnitude(), schedule, rewind=rewind)
    start, before, after = [], [], []
    first = Watch(
        on_train_start=lambda t, m: start.append(state_of(t, m)),
        on_train_batch_end=lambda t, m: before.append(state_of(t, m)),
    )
    last = Watch(on_train_batch_end=lambda t, m: after.append([state_of(t, m), clone(pruner.masks)]))
    trainer(first, pruner, last, default_root_dir=folder, **{"max_epochs": 6} | options).fit(lit, loader())
    return lit, pruner, start + before, after


WEIGHTS = ("net.0.weight", "net.3.weight")
OTHER = ("net.0.bias", "net.1.weight", "net.1.bias", "net.3.bias")
STATISTICS = ("net.1.running_mean", "net.1.running_var", "net.1.num_batches_tracked")
ROUNDS = Levels((0.4, 0.6, 0.8), begin=2, every=1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("rewind", "step"),
    [(Rewind(), 0), (Rewind(at=3), 3), (Rewind(at=8), 8), (Rewind(at=1, unit="epoch"), 4), (Rewind(0, "epoch"), 0)],
    ids=["init", "step3", "step_of_first_event", "epoch1", "epoch0"],
)
def test_kept_weights_equal_the_rewind_point_after_each_round(rewind, step, optimizer, tmp_path):
    lit, pruner, states, after = run(rewind, ROUNDS, tmp_path, optimizer)
    point = states[step]["module"]
    assert [(event.step, event.after, event.rewound) for event in pruner.events] == [
        (8, 0.4, True),
        (12, 0.6, True),
        (16, 0.8, True),
    ]
    for event in pruner.events:
        state, masks = after[event.step - 1]
        assert_same(kept_values(state["module"], masks), kept_values(point, masks))
        assert all(state["module"][name][~mask].count_nonzero() == 0 for name, mask in masks.items())
    # And in between there was training, or equality would say nothing.
    for event in pruner.events[1:]:
        trained = states[event.step]["module"]["net.0.weight"]
        assert not torch.equal(trained, point["net.0.weight"])
    assert masked_values(lit, pruner.masks).count_nonzero() == 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("at", [0, 3])
def test_everything_goes_back_by_default(scheduler, optimizer, at, tmp_path):
    _, pruner, states, after = run(Rewind(at=at), ROUNDS, tmp_path, optimizer, scheduler)
    point = states[at]
    for event in pruner.events:
        state, masks = after[event.step - 1]
        for name in (*OTHER, *STATISTICS):
            assert_same(state["module"][name], point["module"][name], name)
        assert_same(state["groups"], point["groups"])
        assert_same(state["schedulers"], point["schedulers"])
        assert_same(list(state["state"]), list(point["state"]))
        for index, remembered in point["state"].items():
            name = [*WEIGHTS[:1], *OTHER[:3], WEIGHTS[1], OTHER[3]][index]
            for key, value in remembered.items():
                mask = masks.get(name, torch.tensor(True)) if value.shape == point["module"][name].shape else 1
                assert_same(state["state"][index][key], value * mask, f"{name}.{key}")


@pytest.mark.parametrize("option", ["other_parameters", "norm_statistics", "optimizer_state", "lr_schedule"])
@pytest.mark.parametrize("scheduler", ["step_per_epoch", "cosine_per_step", "one_cycle"])
def test_each_option_leaves_what_it_names_and_nothing_else(option, scheduler, tmp_path):
    _, pruner, states, after = run(
        Rewind(at=3, **{option: False}), OneShot(0.6, at=2), tmp_path, "adam", scheduler, max_epochs=3
    )
    step = pruner.events[0].step
    point, trained, (state, masks) = states[3], states[step], after[step - 1]

    def source(name):
        return trained if option == name else point

    for name in OTHER:
        assert_same(state["module"][name], source("other_parameters")["module"][name], name)
    for name in STATISTICS:
        assert_same(state["module"][name], source("norm_statistics")["module"][name], name)
    assert_same(state["groups"], source("lr_schedule")["groups"])
    assert_same(state["schedulers"], source("lr_schedule")["schedulers"])
    moments, expected = state["state"][0], source("optimizer_state")["state"][0]
    mask = masks["net.0.weight"]
    assert_same(moments["step"], expected["step"])
    assert_same(moments["exp_avg"], expected["exp_avg"] * mask)
    assert_same(state["state"][1], source("optimizer_state")["state"][1])
    assert_same(kept_values(state["module"], masks), kept_values(point["module"], masks))
    # What was trained since differs, so that the two are told apart.
    assert trained["schedulers"] != point["schedulers"]
    assert trained["groups"] != point["groups"]
    different = (*OTHER, *STATISTICS)
    assert not any(torch.equal(trained["module"][name], point["module"][name]) for name in different)


@pytest.mark.parametrize("scheduler", ["step_per_epoch", "cosine_per_step", "one_cycle"])
def test_each_round_runs_through_the_same_learning_rates(scheduler, tmp_path):
    _, _, states, _ = run(Rewind(), Levels((0.4, 0.8), begin=2, every=2), tmp_path, "sgd", scheduler)
    rates = [state["groups"][0]["lr"] for state in states]
    # states[8] is the end of round one before its rewind; then steps 1 ... 8 of the next round.
    assert len(set(rates[1:9])) > 1
    assert rates[9:17] == rates[1:9]
    assert rates[17:25] == rates[1:9]


def test_options_all_off_rewind_only_what_holds_masks(tmp_path):
    off = dict.fromkeys(("other_parameters", "norm_statistics", "optimizer_state", "lr_schedule"), False)
    _, pruner, states, after = run(Rewind(**off), OneShot(0.6, at=2), tmp_path, "sgd", "cosine_per_step", max_epochs=3)
    trained, (state, masks) = states[8], after[7]
    assert_same(
        {n: state["module"][n] for n in OTHER + STATISTICS}, {n: trained["module"][n] for n in OTHER + STATISTICS}
    )
    assert_same([state["groups"], state["schedulers"]], [trained["groups"], trained["schedulers"]])
    assert_same(state["state"][1], trained["state"][1])
    assert_same(kept_values(state["module"], masks), kept_values(states[0]["module"], masks))
    assert pruner.events[0].rewound


def test_a_rewound_training_repeats_the_first_round(tmp_path):
    """Rewound with nothing removed from use, training takes the same course: the snapshot is the whole state."""
    lit = Lit(mlp(), OPTIMIZERS["adam"], SCHEDULERS["one_cycle"])
    idle = nn.Parameter(torch.full((2, 2), 1e-9))
    lit.register_module("idle", nn.Linear(2, 2, bias=False))
    lit.idle.weight = idle
    from sparsecomp import Selection

    pruner = Pruning(
        Magnitude(),
        OneShot(0.5, at=2),
        selection=Selection(include=["idle.weight"]),
        rewind=Rewind(),
        allocation="layerwise",
    )
    seen = []
    look = Watch(on_train_batch_start=lambda _, m: seen.append(clone(m.net.state_dict())))
    trainer(pruner, look, max_epochs=4, default_root_dir=tmp_path).fit(lit, loader())
    assert pruner.events[0].rewound
    assert_same(seen[8:], seen[:8])
    assert not torch.equal(seen[0]["0.weight"], seen[7]["0.weight"])


def test_no_rewind_at_the_very_end(tmp_path):
    """The event prunes; the network left in memory is the trained one."""
    lit, pruner, states, after = run(Rewind(), Levels((0.4, 0.8), begin=2, every=1), tmp_path, max_epochs=3)
    assert [(event.step, event.rewound) for event in pruner.events] == [(8, True), (12, False)]
    trained, (state, masks) = states[12], after[11]
    assert_same(kept_values(state["module"], masks), kept_values(trained["module"], masks))
    assert_same(clone(lit.state_dict()), state["module"])
    assert pruner.sparsity == 0.8


def test_no_rewind_at_the_very_end_by_steps(tmp_path):
    _, pruner, _, _ = run(
        Rewind(), Levels((0.4, 0.8), begin=3, every=3, unit="step"), tmp_path, max_epochs=-1, max_steps=6
    )
    assert [(event.step, event.rewound) for event in pruner.events] == [(3, True), (6, False)]


def test_an_event_that_prunes_nothing_does_not_rewind(tmp_path):
    _, pruner, states, after = run(Rewind(), Levels((0.4, 0.4), begin=1, every=1), tmp_path, max_epochs=3)
    assert [event.rewound for event in pruner.events] == [True, False]
    assert_same(after[7][0], states[8])


def test_ticket_and_trained_file_hold_rewind_point_and_result(tmp_path):
    lit, pruner, states, _ = run(Rewind(at=3), ROUNDS, tmp_path)
    assert pruner.ticket_files == {k: str(tmp_path / f"{k}.safetensors") for k in ("ticket", "trained")}
    ticket, trained = Lit(mlp(seed=7, norm=True)), Lit(mlp(seed=8, norm=True))
    store = load_ticket(pruner.ticket_files["ticket"], ticket)
    assert_same(dict(store.masks), dict(pruner.masks))
    point = {name: tensor * pruner.masks.get(name, 1) for name, tensor in states[3]["module"].items()}
    assert_same(clone(ticket.state_dict()), point)
    load_ticket(pruner.ticket_files["trained"], trained)
    assert_same(clone(trained.state_dict()), clone(lit.state_dict()))


def test_a_second_run_overwrites_no_ticket(tmp_path):
    first = run(Rewind(), ROUNDS, tmp_path)[1]
    content = (tmp_path / "ticket.safetensors").read_bytes()
    second = run(Rewind(at=2), ROUNDS, tmp_path)[1]
    assert first.ticket_files["ticket"] == str(tmp_path / "ticket.safetensors")
    assert second.ticket_files["ticket"] == str(tmp_path / "ticket-v1.safetensors")
    assert (tmp_path / "ticket.safetensors").read_bytes() == content


# Snapshot


def trained_network():
    module = mlp(norm=True)
    optimizer = OPTIMIZERS["adam"](module.parameters())
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step():
        optimizer.zero_grad()
        module(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()
        scheduler.step()

    step()
    return module, optimizer, scheduler, step


def storages(state):
    if isinstance(state, torch.Tensor):
        return {state.untyped_storage().data_ptr()}
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return {pointer for value in values for pointer in storages(value)}


def test_a_snapshot_shares_no_storage_and_does_not_change():
    module, optimizer, scheduler, step = trained_network()
    snapshot = Snapshot.take(module, [optimizer], [scheduler])
    live = storages(module.state_dict()) | storages(optimizer.state_dict())
    assert len(storages(snapshot.state_dict())) >= 14
    assert not live & storages(snapshot.state_dict())
    before = clone(snapshot.state_dict())
    for _ in range(2):
        step()
        snapshot.restore(Rewind(), module, ["0.weight"], [optimizer], [scheduler])
        assert not storages(optimizer.state_dict()) & storages(snapshot.state_dict())
        step()
        assert_same(snapshot.state_dict(), before)


def test_restore_writes_into_the_same_tensors():
    module, optimizer, scheduler, step = trained_network()
    pointers = [p.data_ptr() for p in module.parameters()]
    snapshot = Snapshot.take(module, [optimizer], [scheduler])
    step()
    snapshot.restore(Rewind(), module, ["0.weight"], [optimizer], [scheduler])
    assert [p.data_ptr() for p in module.parameters()] == pointers


def test_snapshot_state_round_trips_through_a_file(tmp_path):
    module, optimizer, scheduler, step = trained_network()
    snapshot = Snapshot.take(module, [optimizer], [scheduler])
    torch.save(snapshot.state_dict(), tmp_path / "snapshot.pt")
    loaded = Snapshot.from_state_dict(torch.load(tmp_path / "snapshot.pt", weights_only=True))
    assert_same(loaded.state_dict(), snapshot.state_dict())
    at = clone([module.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    step()
    loaded.restore(Rewind(), module, ["0.weight"], [optimizer], [scheduler])
    assert_same(clone([module.state_dict(), optimizer.state_dict(), scheduler.state_dict()]), at)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(16, 8)),
            r"holds '0\.weight' with shape \(32, 16\), in the network .* \(8, 16\)",
        ),
        (
            lambda: nn.Sequential(nn.Flatten()),
            r"holds '0\.weight' with shape \(32, 16\), in the network it is missing",
        ),
        (lambda: mlp(norm=True), "the rewind snapshot holds 1 optimizers; the training has 0"),
    ],
)
def test_a_snapshot_of_another_network_is_refused_and_changes_nothing(other, message):
    module, optimizer, scheduler, _ = trained_network()
    snapshot = Snapshot.take(module, [optimizer], [scheduler])
    target = other()
    before = clone(target.state_dict())
    with pytest.raises(ValueError, match=message):
        snapshot.restore(Rewind(), target, ["0.weight"])
    assert_same(clone(target.state_dict()), before)


def test_other_schedulers_than_in_the_snapshot_are_left_alone_and_named(caplog):
    """As after SWA has put its own in place; moments go back, learning rates do not."""
    module, optimizer, scheduler, step = trained_network()
    snapshot = Snapshot.take(module, [optimizer], [scheduler])
    point = clone([module.state_dict(), optimizer.state_dict()["state"]])
    step()
    other = lr_scheduler.ExponentialLR(optimizer, 0.3)
    left = clone([other.state_dict(), optimizer.state_dict()["param_groups"]])
    with caplog.at_level(logging.WARNING, "sparsecomp"):
        snapshot.restore(Rewind(), module, ["0.weight"], [optimizer], [other])
    assert_same(clone([module.state_dict(), optimizer.state_dict()["state"]]), point)
    assert_same(clone([other.state_dict(), optimizer.state_dict()["param_groups"]]), left)
    assert len(caplog.messages) == 1
    assert "others than at the rewind point (StepLR)" in caplog.messages[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"at": -1}, ValueError, "`at` is the number of completed steps .* integer >= 0; got -1"),
        ({"at": 1.5, "unit": "epoch"}, TypeError, "`at` is the number of completed epochs .* integer >= 0; got 1.5"),
        ({"at": True}, TypeError, "`at` is .* got True of type bool"),
        (
            {"unit": "fraction"},
            ValueError,
            "`unit` is what `at` is counted in and must be one of 'step', 'epoch'; got 'fr",
        ),
    ],
)
def test_wrong_rewind_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Rewind(**arguments)
