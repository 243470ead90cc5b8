"""Sanity check, validation and test never prune, and change nothing about when pruning happens.

https://github.com/Lightning-AI/pytorch-lightning/issues/1391 and
https://github.com/Lightning-AI/pytorch-lightning/issues/3549
"""

import csv

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, mlp, trainer
from lightning.pytorch.loggers import CSVLogger

from sparsecomp import Levels, LotteryTicketPruning, Magnitude, MagnitudePruning, OneShot, Pruning, Random

PRUNERS = {
    "epochs": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.8), begin=1)),
    "at_init": lambda: Pruning(Random(), Levels((0.3, 0.8), begin=0, every=2)),
    "steps": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.8), begin=2, every=3, unit="step")),
    "fraction": MagnitudePruning,
    "rewind": LotteryTicketPruning,
}
OPTIONS = {
    "sanity_2": {"num_sanity_val_steps": 2},
    "sanity_all": {"num_sanity_val_steps": -1},
    "no_val": {"limit_val_batches": 0},
    "val_in_the_epoch": {"val_check_interval": 2},
    "val_every_other_epoch": {"check_val_every_n_epoch": 2},
}


def fit(folder, kind, look=lambda *_: None, **options):
    torch.manual_seed(11)
    module, pruner = Lit(mlp()), PRUNERS[kind]()
    logger = CSVLogger(folder)
    watch = Watch(on_train_batch_end=look)
    trainer(pruner, watch, logger=logger, default_root_dir=folder, **options).fit(module, loader(), loader())
    with (folder / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        logged = [(row["step"], row["pruning/sparsity"]) for row in csv.DictReader(file) if row["pruning/sparsity"]]
    return pruner, module, logged


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", PRUNERS)
def test_same_masks_events_and_series(tmp_path, kind, options):
    pruner, module, logged = fit(tmp_path / "a", kind, num_sanity_val_steps=0)
    other, other_module, other_logged = fit(tmp_path / "b", kind, **OPTIONS[options])
    assert other.events == pruner.events
    assert len(pruner.events) >= 2
    assert_same(dict(other.masks), dict(pruner.masks))
    assert_same(other_module.state_dict(), module.state_dict())
    assert other_logged == logged
    assert [step for step, _ in logged] == ["3", "7", "11", "15"]


@pytest.mark.parametrize("kind", PRUNERS)
def test_nothing_happens_in_the_sanity_check(tmp_path, kind):
    seen = []

    def look(trainer, module):
        if trainer.sanity_checking:
            seen.append((pruner.sparsity, len(pruner.events), clone(module.state_dict())))

    module, pruner = Lit(mlp()), PRUNERS[kind]()
    before = clone(module.state_dict())
    hooks = dict.fromkeys(("on_sanity_check_start", "on_validation_batch_end", "on_sanity_check_end"), look)
    t = trainer(pruner, Watch(**hooks), num_sanity_val_steps=2, max_epochs=1, default_root_dir=tmp_path)
    t.fit(module, loader(), loader())
    assert len(seen) >= 3
    for sparsity, events, state in seen:
        assert (sparsity, events) == (0.0, 0)
        assert_same(state, before)


@pytest.mark.parametrize("kind", PRUNERS)
def test_fast_dev_run_never_prunes(tmp_path, kind):
    """It goes through the code once; the schedule's few events must not fall on its one batch."""

    def run(*pruners, **options):
        torch.manual_seed(11)
        module = Lit(mlp())
        trainer(*pruners, default_root_dir=tmp_path / "d", **options).fit(module, loader(), loader())
        return module

    pruner = PRUNERS[kind]()
    module = run(pruner, fast_dev_run=True)
    assert pruner.events == []
    assert pruner.sparsity == 0.0
    assert_same(module.state_dict(), run(fast_dev_run=True).state_dict())
    assert not (tmp_path / "d").exists()  # no ticket files
    # Nor does it move the schedule of a training that follows.
    torch.manual_seed(11)
    trainer(pruner, default_root_dir=tmp_path).fit(again := Lit(mlp()), loader(), loader())
    fresh = PRUNERS[kind]()
    assert_same(again.state_dict(), run(fresh).state_dict())
    assert pruner.events == fresh.events
    assert fresh.events


@pytest.mark.parametrize("run", ["validate", "test", "predict"])
@pytest.mark.parametrize("kind", PRUNERS)
def test_evaluation_never_prunes(tmp_path, kind, run):
    module, pruner = Lit(mlp()), PRUNERS[kind]()
    before = clone(module.state_dict())
    quiet = {} if run == "predict" else {"verbose": False}
    t = trainer(pruner, default_root_dir=tmp_path)

    def evaluate():
        # predict_step of Lightning calls the network with the batch
        module.predict_step = lambda batch, batch_idx: module(batch[0])
        getattr(t, run)(module, loader(), **quiet)

    evaluate()
    assert pruner.events == []
    assert pruner.sparsity == 0.0
    assert_same(clone(module.state_dict()), before)
    t.fit(module, loader(), loader())
    state, events, masks = clone(module.state_dict()), pruner.events, clone(pruner.masks)
    assert events
    evaluate()
    evaluate()
    assert_same(clone(module.state_dict()), state)
    assert pruner.events == events
    assert_same(dict(pruner.masks), masks)


@pytest.mark.parametrize("run", ["validate", "test"])
def test_evaluation_of_a_checkpoint_leaves_it_as_it_is(tmp_path, run):
    module, pruner = Lit(mlp()), PRUNERS["epochs"]()
    t = trainer(pruner, default_root_dir=tmp_path)
    t.fit(module, loader())
    t.save_checkpoint(tmp_path / "run.ckpt")
    state = clone(module.state_dict())
    fresh, other = Lit(mlp(seed=3)), Pruning(Magnitude(), OneShot(0.99, at=0))
    getattr(trainer(other), run)(fresh, loader(), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    assert_same(clone(fresh.state_dict()), state)
    # What it says of itself is what the checkpoint says, not an event of its own.
    assert other.events in ([], pruner.events)
    pruned = sum(int((~mask).sum()) for mask in other.masks.values())
    assert other.sparsity == pruned / 640


@pytest.mark.parametrize("run", ["validate", "test"])
def test_evaluation_of_a_checkpoint_does_not_reach_the_training_of_another_network(tmp_path, run):
    module, pruner = Lit(mlp()), PRUNERS["epochs"]()
    t = trainer(pruner, default_root_dir=tmp_path)
    t.fit(module, loader())
    t.save_checkpoint(tmp_path / "run.ckpt")
    expected = PRUNERS["steps"]()
    trained = Lit(mlp(seed=4))
    trainer(expected).fit(trained, loader())
    other, again = PRUNERS["steps"](), Lit(mlp(seed=4))
    getattr(trainer(other), run)(Lit(mlp(seed=3)), loader(), ckpt_path=tmp_path / "run.ckpt", verbose=False)
    trainer(other).fit(again, loader())
    assert other.events == expected.events
    assert_same(again.state_dict(), trained.state_dict())


def test_validation_between_two_fits_changes_nothing(tmp_path):
    def run(*, evaluate):
        module, pruner = Lit(mlp()), Pruning(Magnitude(), Levels((0.3, 0.8), begin=1, every=2))
        trainer(pruner, max_epochs=2).fit(module, loader())
        if evaluate:
            trainer(pruner).validate(module, loader(), verbose=False)
            trainer(pruner).test(module, loader(), verbose=False)
        trainer(pruner, max_epochs=4).fit(module, loader())
        return pruner, module

    (pruner, module), (other, other_module) = run(evaluate=False), run(evaluate=True)
    assert other.events == pruner.events
    assert_same(other_module.state_dict(), module.state_dict())
