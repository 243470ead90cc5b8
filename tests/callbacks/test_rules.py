"""The rules that make masks in place safe, each through a real training."""

import pytest
import torch
from helpers import Lit, Watch, assert_same, clone, loader, masked_values, mlp, trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsecomp import Levels, Magnitude, OneShot, Pruning, Rewind


def at_start(sparsity=0.8):
    return Pruning(Magnitude(), OneShot(sparsity, at=0, unit="step"))


# 1. Gradients are masked before they are clipped


def only_kept_entries(optimizer, masks, clip, clipping, epochs, accumulate):
    """The same training written by hand, in which the kept entries are the only parameters there are."""
    module = mlp()
    kept = {name: nn.Parameter(dict(module.named_parameters())[name].detach()[mask]) for name, mask in masks.items()}
    biases = {name: p for name, p in module.named_parameters() if name not in masks}
    parameters = [kept.get(name, biases.get(name)) for name, _ in module.named_parameters()]
    stepper = optimizer(parameters)

    def weights():
        full = {name: torch.zeros(mask.shape).masked_scatter(mask, kept[name]) for name, mask in masks.items()}
        return full | biases

    for _ in range(epochs):
        for index, (x, y) in enumerate(loader()):
            loss = nn.functional.cross_entropy(torch.func.functional_call(module, weights(), x), y)
            (loss / accumulate).backward()
            if (index + 1) % accumulate == 0:
                clipping(parameters, clip)
                stepper.step()
                stepper.zero_grad()
    return clone(weights())


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
    ids=["sgd", "adamw"],
)
@pytest.mark.parametrize(
    ("algorithm", "clipping", "clip"),
    [("norm", nn.utils.clip_grad_norm_, 0.05), ("value", nn.utils.clip_grad_value_, 0.005)],
    ids=["norm", "value"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipped_training_equals_that_of_the_kept_entries_alone(optimizer, algorithm, clipping, clip, accumulate):
    lit, pruner = Lit(mlp(), optimizer), at_start()
    trainer(
        pruner,
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=accumulate,
    ).fit(lit, loader())
    masks = {name.removeprefix("net."): mask for name, mask in pruner.masks.items()}
    expected = only_kept_entries(optimizer, masks, clip, clipping, 4, accumulate)
    for name, tensor in lit.net.named_parameters():
        torch.testing.assert_close(tensor.detach(), expected[name], rtol=1e-5, atol=1e-6)


class ManualClipping(Lit):
    """Manual optimization, where the user's own code clips before it steps."""

    def __init__(self, net, clip):
        super().__init__(net, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
        self.automatic_optimization = False
        self.clip = clip

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")
        optimizer.step()


def test_manual_clipping_equals_that_of_the_kept_entries_alone():
    lit, pruner = ManualClipping(mlp(), 0.05), at_start()
    trainer(pruner).fit(lit, loader())
    masks = {name.removeprefix("net."): mask for name, mask in pruner.masks.items()}
    expected = only_kept_entries(lit.make_optimizer, masks, 0.05, nn.utils.clip_grad_norm_, 4, 1)
    for name, tensor in lit.net.named_parameters():
        torch.testing.assert_close(tensor.detach(), expected[name], rtol=1e-5, atol=1e-6)


def test_nan_in_masked_gradients_does_not_spread():
    """An infinite input that only masked weights see: their gradient is NaN or infinite, the norm stays finite."""

    class Dead(Lit):
        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            weight = self.net[0].weight
            return loss + (weight[~pruner.masks["net.0.weight"]] * float("inf")).nan_to_num().sum() * float("inf") * 0

    lit, pruner = Dead(mlp()), at_start()
    trainer(pruner, gradient_clip_val=1.0).fit(lit, loader())
    assert all(bool(p.isfinite().all()) for p in lit.parameters())
    assert masked_values(lit, pruner.masks).count_nonzero() == 0


# 2. The optimizer forgets what is pruned, once per event


def test_momentum_of_pruned_weights_is_zeroed_at_the_event_and_kept_places_keep_theirs():
    seen = []

    def look(trainer, module):
        buffer = trainer.optimizers[0].state[module.net[0].weight]["momentum_buffer"]
        seen.append((clone(buffer), clone(module.net[0].weight)))

    pruner = Pruning(Magnitude(), OneShot(0.8, at=3, unit="step"))
    before, after = Watch(on_train_batch_end=look), Watch(on_train_batch_end=look)
    trainer(before, pruner, after, max_steps=5).fit(Lit(mlp()), loader())
    mask = pruner.masks["net.0.weight"]
    (before_event, weight_before), (after_event, weight_after) = seen[4:6]
    assert before_event[~mask].count_nonzero() == int((~mask).sum())
    assert after_event[~mask].count_nonzero() == 0
    assert torch.equal(after_event[mask], before_event[mask])
    assert torch.equal(weight_after[mask], weight_before[mask])
    assert weight_after[~mask].count_nonzero() == 0
    assert all(buffer[~mask].count_nonzero() == 0 for buffer, _ in seen[6:])


# 4. Masks, position and the rewind snapshot are state: test_resume.py


# 5. A load during fit, also after the last event


@pytest.mark.parametrize("strictly_after", [1, 6])
def test_a_load_during_fit_is_masked_at_once(strictly_after):
    pruner = Pruning(Magnitude(), OneShot(0.8, at=1, unit="step"))
    left = []

    def load(trainer, module):
        if trainer.global_step == 1 + strictly_after:
            module.load_state_dict({name: torch.ones_like(t) for name, t in module.state_dict().items()})
            left.append(masked_values(module, pruner.masks).count_nonzero().item())
            left.append(int((module.net[0].weight == 1).sum() + (module.net[2].weight == 1).sum()))

    trainer(pruner, Watch(on_train_batch_start=load)).fit(Lit(mlp()), loader())
    assert left == [0, 128]


def test_after_fit_the_network_is_free():
    lit, pruner = Lit(mlp()), at_start()
    trainer(pruner).fit(lit, loader())
    lit.load_state_dict({name: torch.ones_like(t) for name, t in lit.state_dict().items()})
    assert masked_values(lit, pruner.masks).count_nonzero() == 512


def test_fit_leaves_the_network_sparse_also_after_another_callback_wrote_to_it_at_the_end():
    lit, pruner = Lit(mlp()), at_start()
    dense = Watch(on_train_end=lambda _, module: module.net[0].weight.data.fill_(1.0))
    trainer(pruner, dense).fit(lit, loader())
    assert masked_values(lit, pruner.masks).count_nonzero() == 0
    assert int((lit.net[0].weight == 1.0).sum()) == int(pruner.masks["net.0.weight"].sum())


def test_an_exception_lets_go_of_the_network():
    def fail(trainer, module):
        raise ArithmeticError("stop")

    lit, pruner = Lit(mlp()), at_start()
    with pytest.raises(ArithmeticError, match="stop"):
        trainer(pruner, Watch(on_train_epoch_end=fail)).fit(lit, loader())
    assert pruner.sparsity == 0.8
    lit.load_state_dict({name: torch.ones_like(t) for name, t in lit.state_dict().items()})
    assert masked_values(lit, pruner.masks).count_nonzero() == 512


# 6. Averages obey the masks

RISING = Levels((0.5, 0.8), begin=2, every=5, unit="step")


@pytest.mark.parametrize("first", [True, False])
def test_ema_obeys_the_masks(first):
    lit, pruner = Lit(mlp()), Pruning(Magnitude(), RISING)
    ema = EMAWeightAveraging(decay=0.9)
    seen = []

    def look(trainer, module):
        average = ema._average_model.module
        seen.append((trainer.global_step, masked_values(average, pruner.masks).count_nonzero().item()))

    order = [ema, pruner] if first else [pruner, ema]
    trainer(*order, Watch(on_train_batch_end=look, on_validation_end=look)).fit(lit, loader(), loader())
    assert len(seen) > 16
    assert {nonzero for _, nonzero in seen} == {0}
    assert pruner.sparsity == 0.8
    assert masked_values(lit, pruner.masks).count_nonzero() == 0


@pytest.mark.parametrize("first", [True, False])
def test_swa_obeys_the_masks(first):
    lit, pruner = Lit(mlp()), Pruning(Magnitude(), Levels((0.5, 0.8), begin=2, every=9, unit="step"))
    swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    trainer(*([swa, pruner] if first else [pruner, swa]), max_epochs=5).fit(lit, loader())
    assert pruner.sparsity == 0.8
    assert masked_values(lit, pruner.masks).count_nonzero() == 0
    assert masked_values(swa._average_model, pruner.masks).count_nonzero() == 0


def test_swa_and_a_rewind_after_it_began(tmp_path):
    """SWA puts its own scheduler in place; the event after that still rewinds the weights."""
    lit, pruner = Lit(mlp()), Pruning(Magnitude(), OneShot(0.8, at=3), rewind=Rewind())
    swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    initial, after = clone(lit.state_dict()), []
    look = Watch(on_train_batch_end=lambda _, module: after.append(clone(module.state_dict())))
    trainer(swa, pruner, look, max_epochs=5, default_root_dir=tmp_path).fit(lit, loader())
    assert pruner.events[0].rewound
    assert_same(after[11], {name: tensor * pruner.masks.get(name, 1) for name, tensor in initial.items()})
    assert masked_values(lit, pruner.masks).count_nonzero() == 0


class WithAverage(Lit):
    """An average that the module keeps itself."""

    def __init__(self, net):
        super().__init__(net)
        self.average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def configure_optimizers(self):
        return self.make_optimizer(self.net.parameters())

    def on_train_batch_end(self, *_):
        self.average.update_parameters(self.net)


def test_an_average_within_the_module_obeys_the_masks():
    lit, pruner = WithAverage(mlp()), Pruning(Magnitude(), RISING)
    seen = []

    def look(trainer, module):
        masks = {name.replace("net.", "average.module."): mask for name, mask in pruner.masks.items()}
        seen.append(masked_values(module, masks).count_nonzero().item())

    trainer(pruner, Watch(on_train_batch_start=look, on_train_epoch_end=look)).fit(lit, loader())
    assert set(pruner.masks) == {"net.0.weight", "net.2.weight"}
    assert set(seen) == {0}


def test_a_rewind_leaves_an_average_within_the_module_alone(tmp_path):
    """Kept places of the average go on as they were; only masks reach it."""
    lit, pruner = WithAverage(mlp()), Pruning(Magnitude(), OneShot(0.8, at=8, unit="step"), rewind=Rewind(at=0))
    seen = []

    def look(trainer, module):
        if trainer.global_step == 8:
            seen.append(clone(module.average.module.state_dict()))

    watch = Watch(on_train_batch_end=look)
    trainer(watch, pruner, Watch(on_train_batch_end=look), max_steps=9, default_root_dir=tmp_path).fit(lit, loader())
    masks = {name.removeprefix("net."): mask for name, mask in pruner.masks.items()}
    expected = {name: tensor * masks.get(name, 1) for name, tensor in seen[0].items()}
    assert pruner.events[0].rewound
    assert_same(seen[1], expected)


# 8. Other shapes than the masks'


def test_after_a_physical_cut_in_training_the_error_names_the_parameter():
    pruner = at_start()

    def cut(trainer, module):
        module.net[0] = nn.Linear(16, 20)
        module.net[2].weight = nn.Parameter(module.net[2].weight[:, :20].clone())

    with pytest.raises(ValueError, match=r"mask of 'net\.2\.weight' has shape \(4, 32\) and the parameter \(4, 20\)"):
        trainer(pruner, Watch(on_train_epoch_start=cut)).fit(Lit(mlp()), loader())


# 9. Nothing prunes by surprise


@pytest.mark.parametrize("entry", ["validate", "test"])
def test_validate_and_test_never_prune(entry):
    lit, pruner = Lit(mlp()), at_start()
    before = clone(lit.state_dict())
    getattr(trainer(pruner), entry)(lit, loader(), verbose=False)
    assert_same(clone(lit.state_dict()), before)
    assert (dict(pruner.masks), pruner.events, pruner.sparsity) == ({}, [], 0.0)


def test_validating_a_trained_network_changes_nothing():
    lit, pruner = Lit(mlp()), at_start()
    trainer(pruner).fit(lit, loader())
    before = clone([lit.state_dict(), pruner.masks])
    trainer(pruner).validate(lit, loader(), verbose=False)
    assert_same(clone([lit.state_dict(), pruner.masks]), before)
    assert len(pruner.events) == 1


def test_the_sanity_check_sees_the_dense_network_and_prunes_nothing():
    lit, pruner = Lit(mlp()), at_start()
    before, seen = clone(lit.state_dict()), []

    def look(trainer, module):
        seen.append((trainer.sanity_checking, clone(module.state_dict()), pruner.sparsity))

    trainer(pruner, Watch(on_validation_end=look), num_sanity_val_steps=2, max_epochs=1).fit(lit, loader(), loader())
    assert seen[0][::2] == (True, 0.0)
    assert_same(seen[0][1], before)
    assert seen[1][::2] == (False, 0.8)


def test_fast_dev_run_writes_no_ticket(tmp_path):
    """It runs one batch, which is a whole training: events at its start and end are due, files are not."""
    lit, pruner = Lit(mlp()), Pruning(Magnitude(), OneShot(0.8, at=3), rewind=Rewind())
    before = clone(lit.state_dict())
    trainer(pruner, fast_dev_run=True, default_root_dir=tmp_path).fit(lit, loader(), loader())
    assert pruner.events == []
    assert lit.net[0].weight.count_nonzero() == before["net.0.weight"].count_nonzero()
    assert list(tmp_path.iterdir()) == []
    assert pruner.ticket_files == {}
