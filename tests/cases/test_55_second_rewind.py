"""Every rewind goes to the rewind point, bit for bit, not only the first one.

https://github.com/Lightning-AI/pytorch-lightning/issues/13643
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer
from torch import optim

from sparsecomp import Geometric, Layerwise, Levels, LotteryTicketPruning, Magnitude, Pruning, Random, Rewind

ROUNDS, REWIND_STEP, STEPS = 3, 2, 4  # STEPS an epoch

OPTIMIZERS = {
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adamw_fused": lambda params: optim.AdamW(params, lr=0.01, fused=True),
    "amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True),
}


def by_step(optimizer):
    return {"scheduler": optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9), "interval": "step"}


def state(trainer, module):
    """All that a rewind may put back."""
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    return {
        "module": clone(module.state_dict()),
        "optimizer": clone(trainer.optimizers[0].state_dict()),
        "lr": clone({k: v for k, v in scheduler.state_dict().items() if not k.startswith("_")}),
    }


def run(folder, rewind, optimizer="momentum", criterion=None, allocation="global", epochs=5):
    """Events after epochs 1, 2 and 3; what there was after each step, behind the pruner and before the scheduler."""
    module, seen, before = Lit(mlp(norm=True), OPTIMIZERS[optimizer], by_step), {}, {}
    pruner = Pruning(criterion or Magnitude(), Geometric(0.8, rounds=ROUNDS, begin=1), allocation, rewind=rewind)
    watches = [
        Watch(on_train_start=lambda t, m: before.setdefault(0, state(t, m))),
        Watch(on_train_batch_end=lambda t, m: before.setdefault(t.global_step, state(t, m))),
        pruner,
        Watch(on_train_batch_end=lambda t, m: seen.setdefault(t.global_step, (state(t, m), clone(pruner.masks)))),
    ]
    trainer(*watches, max_epochs=epochs, default_root_dir=folder).fit(module, loader(), loader())
    assert [(e.step, e.rewound) for e in pruner.events] == [(4, True), (8, True), (12, True)]
    return module, pruner, before, seen


def masked(tensors, masks):
    return {name: value * masks[name] if name in masks else value for name, value in tensors.items()}


def parameters(tensors):
    return {name: value for name, value in tensors.items() if "running" not in name and "num_batches" not in name}


@pytest.mark.parametrize("at", [0, REWIND_STEP, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_round_starts_at_the_rewind_point(tmp_path, optimizer, at):
    _, pruner, before, seen = run(tmp_path, Rewind(at=at), optimizer)
    origin = before[at]
    for event in pruner.events:
        after, masks = seen[event.step]
        assert sum(int((~m).sum()) for m in masks.values()) == round(640 * event.target)
        # Weights, biases, norm scales and the norms' statistics.
        assert_same(after["module"], masked(origin["module"], masks))
        # Optimizer state: that of the rewind point, zero for pruned weights; at initialisation none.
        assert after["optimizer"]["state"].keys() == origin["optimizer"]["state"].keys()
        names = [name for name, _ in mlp(norm=True).named_parameters(prefix="net")]
        for index, values in origin["optimizer"]["state"].items():
            for key, value in values.items():
                mask = masks.get(names[index])
                fits = torch.is_tensor(value) and mask is not None and value.shape == mask.shape
                assert_same(after["optimizer"]["state"][index][key], value * mask if fits else value)
        assert_same(after["optimizer"]["param_groups"], origin["optimizer"]["param_groups"])
        assert_same(after["lr"], origin["lr"])


@pytest.mark.parametrize("at", [0, REWIND_STEP])
@pytest.mark.parametrize("criterion", [Magnitude(), Random()])
@pytest.mark.parametrize("allocation", ["layerwise", "erk", Layerwise("unit")])
def test_with_other_criteria_and_allocations(tmp_path, allocation, criterion, at):
    module, pruner, before, seen = run(tmp_path, Rewind(at=at), criterion=criterion, allocation=allocation)
    for event in pruner.events:
        after, masks = seen[event.step]
        assert_same(after["module"], masked(before[at]["module"], masks))
    assert not masked_values(module, pruner.masks).any()


@pytest.mark.parametrize("at", [0, REWIND_STEP])
def test_the_snapshot_shares_no_memory_with_the_network_and_never_changes(tmp_path, at):
    module, checked = Lit(mlp(norm=True), OPTIMIZERS["adam"]), []
    pruner = LotteryTicketPruning(Levels((0.4, 0.6, 0.8), begin=1), rewind=Rewind(at=at))
    taken = []

    def addresses(values):
        return {t.untyped_storage().data_ptr() for t in values if torch.is_tensor(t)}

    def look(trainer, module):
        snapshot = pruner.state_dict()["snapshot"]
        if snapshot is None:
            return
        held = addresses(snapshot["tensors"].values())
        held |= addresses(v for s in snapshot["optimizers"][0]["state"].values() for v in s.values())
        live = addresses([*module.state_dict().values(), *(p.grad for p in module.parameters())])
        live |= addresses(v for s in trainer.optimizers[0].state.values() for v in s.values())
        taken.append(clone(snapshot))
        checked.append((trainer.global_step, held & live))

    trainer(pruner, Watch(on_train_batch_end=look), max_epochs=5, default_root_dir=tmp_path).fit(module, loader())
    assert checked == [(step, set()) for step in range(max(at, 1), 21)]
    for later in [*taken, clone(pruner.state_dict()["snapshot"])]:
        assert_same(later, taken[0])


OFF = {
    "other_parameters": {"other_parameters": False},
    "norm_statistics": {"norm_statistics": False},
    "optimizer_state": {"optimizer_state": False},
    "lr_schedule": {"lr_schedule": False},
    "all_four": dict.fromkeys(("other_parameters", "norm_statistics", "optimizer_state", "lr_schedule"), False),
}


@pytest.mark.parametrize("off", OFF)
def test_what_is_switched_off_stays_as_trained(tmp_path, off):
    rewind = Rewind(at=REWIND_STEP, **OFF[off])
    _, pruner, before, seen = run(tmp_path, rewind)
    origin = before[REWIND_STEP]
    for event in pruner.events:
        after, masks = seen[event.step]
        trained = before[event.step]
        for name, value in after["module"].items():
            statistic = "running" in name or "num_batches" in name
            kind = "masked" if name in masks else "norm_statistics" if statistic else "other_parameters"
            back = kind == "masked" or getattr(rewind, kind)
            assert_same(value, masked((origin if back else trained)["module"], masks)[name], name)
            assert not torch.equal(origin["module"][name], trained["module"][name])  # else this says nothing
        source = origin if rewind.optimizer_state else trained
        bias = 1  # index of net.0.bias, which no mask touches
        assert_same(after["optimizer"]["state"][bias], source["optimizer"]["state"][bias])
        source = origin if rewind.lr_schedule else trained
        assert_same(after["optimizer"]["param_groups"], source["optimizer"]["param_groups"])
        assert_same(after["lr"], source["lr"])
        assert origin["lr"]["last_epoch"] != trained["lr"]["last_epoch"]


@pytest.mark.parametrize("unit", ["step", "epoch"])
def test_rewind_point_counted_in_steps_or_epochs(tmp_path, unit):
    at = {"step": 4, "epoch": 1}[unit]
    _, pruner, before, seen = run(tmp_path, Rewind(at=at, unit=unit))
    for event in pruner.events:
        after, masks = seen[event.step]
        assert_same(after["module"], masked(before[4]["module"], masks))


def test_training_goes_on_from_there(tmp_path):
    """Kept weights do move between the rounds, so that going back is no empty promise."""
    _, pruner, before, _ = run(tmp_path, Rewind(at=REWIND_STEP))
    for event in pruner.events:
        moved = before[event.step]["module"]["net.3.weight"] != before[REWIND_STEP]["module"]["net.3.weight"]
        assert moved.float().mean() > 0.9
    assert len(parameters(before[REWIND_STEP]["module"])) == 6
