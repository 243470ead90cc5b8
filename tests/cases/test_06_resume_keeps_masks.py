"""A resumed run equals the uninterrupted one, bit for bit.

https://github.com/IntelLabs/distiller/pull/76 and https://github.com/neuralmagic/sparseml/pull/702
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from sparsecomp import Levels, Magnitude, OneShot, Pruning, Random, Rewind

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
PRUNERS = {
    # Once at the end of epoch 0, then nothing more: what is pruned must stay so without an event.
    "once": lambda: Pruning(Magnitude(), OneShot(0.5, at=1)),
    "levels": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.9), begin=1)),
    "steps": lambda: Pruning(Random(), Levels((0.3, 0.6, 0.9), begin=2, every=3, unit="step")),
    "fraction": lambda: Pruning(Magnitude(), Levels((0.3, 0.9), begin=0.3, every=0.3, unit="fraction")),
    "rewind": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.9), begin=1), rewind=Rewind(at=2)),
    "random": lambda: Pruning(Random(), Levels((0.3, 0.6), begin=1, every=2), "layerwise"),
}
EPOCHS = 4


def decaying(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)


def run(folder, pruner, optimizer, *, seed=0, val=True, ckpt_path=None, look=lambda *_: None, epochs=EPOCHS):
    module = Lit(mlp(seed, norm=True), OPTIMIZERS[optimizer], decaying)
    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    t = trainer(
        pruner,
        save,
        Watch(on_train_batch_end=look),
        max_epochs=epochs,
        enable_checkpointing=True,
        default_root_dir=folder,
    )
    t.fit(module, loader(), loader() if val else None, ckpt_path=ckpt_path)
    return t, module


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", PRUNERS)
def test_resume_equals_the_uninterrupted_run(tmp_path, kind, optimizer):
    pruner = PRUNERS[kind]()
    t, module = run(tmp_path, pruner, optimizer)
    # A new process has another network, another global seed and another pruner object.
    for epoch in range(EPOCHS - 1):
        torch.manual_seed(100 + epoch)
        resumed = PRUNERS[kind]()
        path = tmp_path / f"epoch={epoch}.ckpt"
        t2, module2 = run(tmp_path, resumed, optimizer, seed=7, ckpt_path=path)
        assert resumed.events == pruner.events
        assert_same(dict(resumed.masks), dict(pruner.masks))
        assert_same(module2.state_dict(), module.state_dict())
        assert_same(t2.optimizers[0].state_dict(), t.optimizers[0].state_dict())
        assert_same(t2.lr_scheduler_configs[0].scheduler.state_dict(), t.lr_scheduler_configs[0].scheduler.state_dict())
        assert_same(resumed.state_dict()["snapshot"], pruner.state_dict()["snapshot"])
    assert [e.after for e in pruner.events] == [pruner.schedule.sparsity(p) for p in pruner.schedule.positions]


@pytest.mark.parametrize("val", [True, False])
def test_masks_at_resume_are_those_at_save_and_hold_without_an_event(tmp_path, val):
    saved, pruner = {}, PRUNERS["once"]()

    def remember(trainer, module):
        saved[trainer.global_step] = {name: mask.clone() for name, mask in pruner.masks.items()}

    run(tmp_path, pruner, "adam", val=val, epochs=1, look=remember)
    checkpoint = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    assert_same(checkpoint["callbacks"]["sparsecomp.pruning"]["masks"], saved[4])

    resumed, steps = PRUNERS["once"](), []

    def look(trainer, module):
        assert_same(dict(resumed.masks), saved[4])
        assert not masked_values(module, saved[4]).any()
        steps.append(trainer.global_step)

    _, module = run(tmp_path, resumed, "adam", seed=7, val=val, ckpt_path=tmp_path / "epoch=0.ckpt", look=look)
    assert steps == list(range(5, 17))
    assert resumed.sparsity == 0.5
    assert [(e.position, e.after) for e in resumed.events] == [(1, 0.5)]
    assert not masked_values(module, saved[4]).any()


def test_the_checkpoint_of_an_epoch_is_that_of_the_pruned_network(tmp_path):
    pruner = PRUNERS["levels"]()
    run(tmp_path, pruner, "sgd")
    for epoch, sparsity in enumerate((0.3, 0.6, 0.9, 0.9)):
        checkpoint = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        masks = checkpoint["callbacks"]["sparsecomp.pruning"]["masks"]
        pruned = sum(int((~mask).sum()) for mask in masks.values())
        assert pruned == round(sparsity * 640)
        assert not any(checkpoint["state_dict"][name][~mask].any() for name, mask in masks.items())


def test_a_run_stopped_in_the_middle_of_an_epoch_keeps_its_masks(tmp_path):
    def fit(pruner, module, *callbacks, ckpt_path=None, **options):
        save = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
        t = trainer(pruner, *callbacks, save, enable_checkpointing=True, default_root_dir=tmp_path, **options)
        t.fit(module, loader(), ckpt_path=ckpt_path)

    first = PRUNERS["steps"]()
    fit(first, Lit(mlp()), max_epochs=EPOCHS, max_steps=6)
    resumed, seen = PRUNERS["steps"](), []

    def look(trainer, module):
        seen.append(trainer.global_step)
        assert not masked_values(module, first.masks).any()
        assert not any((resumed.masks[name] & ~mask).any() for name, mask in first.masks.items())

    fit(resumed, Lit(mlp(7)), Watch(on_train_batch_end=look), ckpt_path=tmp_path / "step=6.ckpt", max_epochs=EPOCHS)
    assert seen[0] == 7
    assert [(e.position, e.step) for e in resumed.events] == [(2, 2), (5, 5), (8, 8)]


def test_the_weights_really_depend_on_the_masks(tmp_path):
    """The comparison above would see a run that forgets its masks."""
    _, module = run(tmp_path / "a", PRUNERS["once"](), "sgd")
    _, dense = run(tmp_path / "b", Pruning(Magnitude(), OneShot(0.0, at=1)), "sgd")
    with pytest.raises(AssertionError):
        assert_same(clone(dict(module.named_parameters())), clone(dict(dense.named_parameters())))
