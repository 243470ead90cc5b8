"""A resumed schedule is where it was, though Lightning still says epoch 0 when fit starts.

https://github.com/Lightning-AI/pytorch-lightning/issues/17712
"""

import lightning as L
import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, mlp, trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from sparsecomp import Levels, LotteryTicketPruning, Magnitude, Pruning, Rewind

EPOCHS = 5
PRUNERS = {
    "epoch": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.9), begin=1)),
    "at_init": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.9), begin=0, every=2)),
    "step": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.9), begin=0, every=7, unit="step")),
    "fraction": lambda: Pruning(Magnitude(), Levels((0.3, 0.6, 0.9), begin=0.0, every=0.4, unit="fraction")),
    "rewind_init": lambda: LotteryTicketPruning(Levels((0.3, 0.6, 0.9), begin=1)),
    "rewind_late": lambda: LotteryTicketPruning(Levels((0.3, 0.6, 0.9), begin=2), rewind=Rewind(at=1, unit="epoch")),
}


class Epochs(L.Callback):
    """Which epoch Lightning says it is, hook by hook."""

    def __init__(self):
        self.seen = {}

    def setup(self, trainer, pl_module, stage):
        self.seen["setup"] = trainer.current_epoch

    def on_fit_start(self, trainer, pl_module):
        self.seen["on_fit_start"] = trainer.current_epoch

    def on_train_start(self, trainer, pl_module):
        self.seen["on_train_start"] = trainer.current_epoch


def fit(folder, pruner, *callbacks, seed=0, ckpt_path=None, **hooks):
    module = Lit(mlp(seed, norm=True))
    save = ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    t = trainer(
        pruner,
        save,
        Watch(**hooks),
        *callbacks,
        max_epochs=EPOCHS,
        enable_checkpointing=True,
        default_root_dir=folder / "files",
    )
    t.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("kind", PRUNERS)
def test_resume_at_any_epoch(tmp_path, kind):
    pruner, by_epoch = PRUNERS[kind](), {}

    def remember(trainer, module):
        if trainer.is_last_batch:
            by_epoch[trainer.current_epoch] = (pruner.events, clone(pruner.masks), clone(pruner.state_dict()))

    module = fit(tmp_path, pruner, on_train_batch_end=remember)
    assert [e.after for e in pruner.events] == [0.3, 0.6, 0.9]

    for epoch in range(EPOCHS - 1):
        torch.manual_seed(99 + epoch)
        resumed, epochs = PRUNERS[kind](), Epochs()
        path = tmp_path / f"epoch={epoch}.ckpt"
        saved = torch.load(path, weights_only=True)
        before = by_epoch[epoch]

        def started(trainer, module, resumed=resumed, saved=saved, before=before):
            # After the pruner's own hook: nothing may have happened there.
            assert resumed.events == before[0]
            assert_same(dict(resumed.masks), before[1])
            assert resumed.state_dict()["last_event"] == before[2]["last_event"]
            assert_same(resumed.state_dict()["snapshot"], before[2]["snapshot"])
            assert_same(dict(module.state_dict()), dict(saved["state_dict"]))

        module2 = fit(tmp_path, resumed, epochs, seed=7, ckpt_path=path, on_train_start=started)
        # The trap of the report (if Lightning mends it, this says so); and that all three hooks ran.
        assert epochs.seen == {"setup": 0, "on_fit_start": 0, "on_train_start": epoch + 1}
        # No extra event, and the end is that of the run which was not stopped.
        assert resumed.events == pruner.events
        assert_same(module2.state_dict(), module.state_dict())


@pytest.mark.parametrize(
    ("kind", "epoch"), [("rewind_init", 0), ("rewind_init", 1), ("rewind_late", 1), ("rewind_late", 2)]
)
def test_rewind_after_a_resume_goes_to_the_runs_own_values(tmp_path, kind, epoch):
    pruner = PRUNERS[kind]()
    fit(tmp_path, pruner)
    snapshot = clone(pruner.state_dict()["snapshot"]["tensors"])
    resumed, after_event = PRUNERS[kind](), []

    def look(trainer, module):
        if resumed.events[-1].step == trainer.global_step and resumed.events[-1].rewound:
            after_event.append((clone(resumed.masks), clone(dict(module.named_parameters()))))

    fit(tmp_path, resumed, seed=7, ckpt_path=tmp_path / f"epoch={epoch}.ckpt", on_train_batch_end=look)
    assert after_event
    for masks, weights in after_event:
        for name, value in weights.items():
            assert_same(value, snapshot[name] * masks.get(name, torch.tensor(True)))
    assert_same(clone(resumed.state_dict()["snapshot"]["tensors"]), snapshot)
    fresh_init = dict(Lit(mlp(7, norm=True)).named_parameters())
    assert not torch.equal(snapshot["net.0.weight"], fresh_init["net.0.weight"])


def test_a_rewind_point_that_is_over_cannot_be_made_up(tmp_path):
    """A checkpoint of a run without rewinding has no snapshot: trained values must not pass for one."""
    fit(tmp_path, PRUNERS["epoch"]())
    with pytest.raises(ValueError, match="the rewind point, step 0, is over at step 8"):
        fit(tmp_path, PRUNERS["rewind_init"](), ckpt_path=tmp_path / "epoch=1.ckpt")
