"""Averages of the weights run beside any pruner and obey its masks.

https://github.com/Lightning-AI/pytorch-lightning/pull/20545 and
https://github.com/Lightning-AI/pytorch-lightning/pull/8472
"""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsecomp import Layerwise, Levels, LotteryTicketPruning, Magnitude, Pruning, Random

PRUNERS = {
    "magnitude": lambda: Pruning(Magnitude(), Levels((0.5, 0.8), begin=2)),
    "random_steps": lambda: Pruning(Random(), Levels((0.3, 0.6, 0.9), begin=2, every=5, unit="step")),
    "units": lambda: Pruning(Magnitude(), Levels((0.25, 0.5), begin=2), Layerwise("unit")),
    "rewind": lambda: LotteryTicketPruning(Levels((0.5, 0.8), begin=2)),
    "last_epoch": lambda: Pruning(Magnitude(), Levels((0.5, 0.8), begin=5)),
}
AVERAGES = {
    "every_step": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "ema_late": lambda: EMAWeightAveraging(decay=0.9, update_starting_at_step=6),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=0.34),
}
OPTIMIZERS = {
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: optim.Adam(params, lr=0.01),
}
EPOCHS = 6


def averaged(callback):
    """The network that the callback averages into."""
    average = callback._average_model
    return average.module if isinstance(average, AveragedModel) else average


@pytest.mark.filterwarnings("ignore:Swapping scheduler")  # StochasticWeightAveraging says that it does
@pytest.mark.parametrize(("first", "optimizer"), [("pruner_first", "momentum"), ("average_first", "adam")])
@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("kind", PRUNERS)
def test_the_average_obeys_the_mask_at_every_step_and_after_the_swap(tmp_path, kind, average, optimizer, first):
    module, pruner, callback = Lit(mlp(), OPTIMIZERS[optimizer]), PRUNERS[kind](), AVERAGES[average]()
    names, seen = [name for name, _ in module.named_parameters()], []

    def look(trainer, module):
        assert not masked_values(module, pruner.masks).any()
        assert [name for name, _ in module.named_parameters()] == names
        assert not masked_values(averaged(callback), pruner.masks).any()
        assert [name for name, _ in averaged(callback).named_parameters()] == names
        seen.append(pruner.sparsity)

    callbacks = [pruner, callback] if first == "pruner_first" else [callback, pruner]
    t = trainer(*callbacks, Watch(on_train_batch_end=look), max_epochs=EPOCHS, default_root_dir=tmp_path)
    t.fit(module, loader(), loader())
    assert len(seen) == EPOCHS * 4
    assert seen[-1] == pruner.sparsity == pruner.schedule.final_sparsity
    assert not masked_values(module, pruner.masks).any()
    zeros = [int((dict(module.named_parameters())[name] == 0).sum()) for name in pruner.masks]
    assert zeros == [int((~mask).sum()) for mask in pruner.masks.values()]  # and is not sparser either


@pytest.mark.parametrize("average", ["every_step", "ema"])
def test_the_swapped_network_is_the_average(average):
    """Kept places hold the average of the weights as they were, computed here naively; masked ones 0."""
    module, pruner, callback = Lit(mlp()), PRUNERS["magnitude"](), AVERAGES[average]()
    naive, count = {}, [0]

    def look(trainer, module):
        live = {name: value * pruner.masks.get(name, 1) for name, value in clone(module.state_dict()).items()}
        count[0] += 1
        # The first update copies; then a running mean or an exponential one.
        share = {"every_step": 1 / count[0], "ema": 1.0 if count[0] == 1 else 0.1}[average]
        for name, value in live.items():
            naive[name] = naive.get(name, value) * (1 - share) + value * share
            naive[name] = naive[name] * pruner.masks.get(name, 1)

    trainer(callback, pruner, Watch(on_train_batch_end=look), max_epochs=EPOCHS).fit(module, loader())
    final = module.state_dict()
    for name, value in naive.items():
        torch.testing.assert_close(final[name], value, rtol=1e-4, atol=1e-6)
    assert not masked_values(module, pruner.masks).any()


def test_validation_of_the_average_sees_it_sparse():
    """WeightAveraging swaps the average in for validation."""
    module, pruner, seen = Lit(mlp()), PRUNERS["magnitude"](), []

    def look(trainer, module):
        if not trainer.sanity_checking:
            seen.append((pruner.sparsity, bool(masked_values(module, pruner.masks).any())))

    t = trainer(pruner, EMAWeightAveraging(decay=0.9), Watch(on_validation_batch_end=look), max_epochs=4)
    t.fit(module, loader(), loader())
    assert seen == [(0.0, False)] * 4 + [(0.5, False)] * 4 + [(0.8, False)] * 8


@pytest.mark.parametrize("average", ["every_step", "ema"])
def test_a_checkpoint_of_the_average_is_sparse_and_resumes(tmp_path, average):
    """The callback saves the average as the network, and the network itself besides."""

    def fit(seed=0, ckpt_path=None):
        module, pruner, callback = Lit(mlp(seed)), PRUNERS["magnitude"](), AVERAGES[average]()
        save = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
        t = trainer(pruner, callback, save, max_epochs=5, enable_checkpointing=True, default_root_dir=tmp_path)
        t.fit(module, loader(), loader(), ckpt_path=ckpt_path)
        return module, pruner

    module, pruner = fit()
    for epoch in range(4):
        saved = torch.load(tmp_path / f"epoch={epoch}.ckpt", weights_only=True)
        masks = saved["callbacks"]["sparsecomp.pruning"]["masks"]
        assert sum(int((~mask).sum()) for mask in masks.values()) == [0, 320, 512, 512][epoch]
        for states in (saved["state_dict"], saved["current_model_state"]):
            assert not any(states[name][~mask].any() for name, mask in masks.items())
        resumed, again = fit(seed=5, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert_same(dict(again.masks), dict(pruner.masks))
        assert_same(resumed.state_dict(), module.state_dict())


class WithTeacher(Lit):
    """Keeps an average of its own network, as self-distillation does."""

    def __init__(self, ema):
        super().__init__(mlp())
        self.teacher = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9) if ema else None)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.teacher.update_parameters(self.net)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            soft = self.teacher(x).softmax(1)
        out = self.net(x)
        return nn.functional.cross_entropy(out, y) + nn.functional.cross_entropy(out, soft)

    def configure_optimizers(self):
        return optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("kind", PRUNERS)
def test_an_averaged_model_within_the_module(tmp_path, kind, ema):
    module, pruner, seen = WithTeacher(ema), PRUNERS[kind](), []
    names = [name for name, _ in module.named_parameters()]

    def look(trainer, module):
        masks = {name.removeprefix("net."): mask for name, mask in pruner.masks.items()}
        assert not masked_values(module.net, masks).any()
        assert [name for name, _ in module.named_parameters()] == names
        seen.append((pruner.sparsity, masked_values(module.teacher.module, masks)))

    # After the module's own hook, which updates its average.
    watch = Watch(on_train_batch_start=look)
    trainer(pruner, watch, max_epochs=EPOCHS, default_root_dir=tmp_path).fit(module, loader(), loader())
    # The average is no parameter to prune for itself, and is not counted.
    assert all(name.startswith("net.") for name in pruner.masks)
    assert len(seen) == EPOCHS * 4
    assert all(not values.any() for _, values in seen)
    masks = {name.removeprefix("net."): mask for name, mask in pruner.masks.items()}
    assert not masked_values(module.teacher.module, masks).any()
    assert int(module.teacher.n_averaged) == EPOCHS * 4
    zeros = [int((dict(module.teacher.module.named_parameters())[name] == 0).sum()) for name in masks]
    assert zeros == [int((~mask).sum()) for mask in masks.values()]


def test_the_same_training_with_an_average_beside_it():
    """An average changes neither masks nor events of the pruner, nor the way of the weights."""

    def run(*callbacks):
        module, pruner, seen = Lit(mlp()), PRUNERS["magnitude"](), []
        watch = Watch(on_train_batch_end=lambda t, m: seen.append(clone(dict(m.named_parameters()))))
        trainer(pruner, *callbacks, watch, max_epochs=EPOCHS).fit(module, loader(), loader())
        return pruner, seen

    alone, way = run()
    beside, same_way = run(EMAWeightAveraging(decay=0.9))
    assert alone.events == beside.events
    assert_same(dict(alone.masks), dict(beside.masks))
    assert_same(way, same_way)
