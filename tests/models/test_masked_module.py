"""The LightningModule of configs: its optimizer, schedule, metrics and checkpoints."""

import csv

import lightning as L
import pytest
import torch
from helpers import trainer
from lightning.pytorch.cli import ReduceLROnPlateau
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from sparsecomp.data import TensorBatches
from sparsecomp.models import MLP, MaskedModule


def batches(seed=0, n=30, batch_size=8):
    g = torch.Generator().manual_seed(seed)
    return TensorBatches(torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g), batch_size=batch_size)


def module(**options):
    torch.manual_seed(0)
    return MaskedModule(MLP(6, 3, hidden=(8,)), nn.CrossEntropyLoss(), **options)


def optimizer_in_fit(made, **options):
    t = trainer(max_epochs=1, **options)
    t.fit(made, batches())
    (optimizer,) = t.optimizers
    return optimizer


# Optimizer


def test_adamw_with_its_defaults():
    optimizer = module().configure_optimizers()
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults | {"fused": None} == torch.optim.AdamW(module().parameters()).defaults


FUSES = {
    "default": None,
    "adam": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02),
    "fused=True": lambda p: torch.optim.AdamW(p, fused=True),
}
STAYS = {
    "fused=False": lambda p: torch.optim.AdamW(p, fused=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "differentiable": lambda p: torch.optim.AdamW(p, differentiable=True),
    "no fused implementation": lambda p: torch.optim.RMSprop(p, lr=0.02),
    "tensor as learning rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02)),
}


@pytest.mark.parametrize("kind", FUSES)
def test_fused_where_it_may_be(kind):
    made = module(optimizer=FUSES[kind])
    optimizer = optimizer_in_fit(made)
    assert optimizer.defaults["fused"] is True
    # All else is as asked for.
    wanted = (FUSES[kind] or torch.optim.AdamW)(made.parameters())
    assert type(optimizer) is type(wanted)
    assert optimizer.defaults | {"fused": 0} == wanted.defaults | {"fused": 0}
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [p.shape for p in made.parameters()]


@pytest.mark.parametrize("kind", [kind for kind in STAYS if kind != "differentiable"])
def test_not_fused_where_it_may_not_be(kind):
    optimizer = optimizer_in_fit(module(optimizer=STAYS[kind]))
    wanted = STAYS[kind](module().parameters())
    assert type(optimizer) is type(wanted)
    assert optimizer.defaults == wanted.defaults


def test_a_differentiable_optimizer_is_not_fused():
    assert not module(optimizer=STAYS["differentiable"]).configure_optimizers().defaults.get("fused")


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"gradient_clip_val": 0.5}, True),
        ({"precision": "bf16-mixed"}, True),
        # Lightning refuses this with a fused optimizer: it unscales gradients there.
        ({"gradient_clip_val": 0.5, "precision": "bf16-mixed"}, None),
        ({"gradient_clip_val": 0.0, "precision": "bf16-mixed"}, True),
    ],
)
def test_fused_with_clipping_and_mixed_precision(options, fused):
    assert optimizer_in_fit(module(), **options).defaults["fused"] is fused


def test_fused_is_the_same_training():
    fused, plain = module(), module(optimizer=STAYS["fused=False"])
    optimizer_in_fit(fused)
    optimizer_in_fit(plain)
    for name, tensor in fused.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


# Schedule


def rates(made, epochs=2, **options):
    """The learning rate of each step."""
    seen = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    t = trainer(Look(), max_epochs=epochs, num_sanity_val_steps=0, **options)
    t.fit(made, batches(), batches(seed=1))
    return seen, t


def halve(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.8)


def test_no_schedule_is_a_constant_rate():
    assert rates(module(optimizer=sgd))[0] == [0.8] * 8


def test_a_schedule_by_epoch_is_the_default():
    assert rates(module(optimizer=sgd, lr_scheduler=halve))[0] == [0.8] * 4 + [0.4] * 4


def test_a_schedule_by_step():
    made = module(optimizer=sgd, lr_scheduler=halve, lr_interval="step")
    assert rates(made)[0] == pytest.approx([0.8 / 2**i for i in range(8)])


def test_a_schedule_acts_on_the_optimizer_that_is_used():
    made = module(optimizer=sgd, lr_scheduler=halve)
    _, t = rates(made)
    (config,) = t.lr_scheduler_configs
    assert config.scheduler.optimizer is t.optimizers[0]
    assert t.optimizers[0].defaults["fused"] is True


def test_reduce_on_plateau_follows_what_it_monitors():
    def plateau(optimizer):
        # No loss is as low as this, so that each epoch after the first is a plateau.
        return ReduceLROnPlateau(
            optimizer, monitor="val/loss", factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
        )

    seen, t = rates(module(optimizer=sgd, lr_scheduler=plateau), epochs=3)
    assert seen == [0.8] * 8 + [0.4] * 4
    assert t.lr_scheduler_configs[0].monitor == "val/loss"
    assert t.lr_scheduler_configs[0].reduce_on_plateau


# Metrics


def naive(network, loader):
    """Loss as the mean over samples, accuracy over all of them."""
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    with torch.no_grad():
        predictions = network(x)
    return float(F.cross_entropy(predictions, y)), float((predictions.argmax(1) == y).float().mean())


def test_logged_metrics_equal_a_naive_computation(tmp_path):
    # A learning rate of zero: the network is the same in each batch, so that training metrics have a known value too.
    made = module(
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        metrics={"accuracy": MulticlassAccuracy(3, average="micro")},
    )
    t = trainer(max_epochs=2, logger=CSVLogger(tmp_path, "", ""), log_every_n_steps=1)
    loaders = {"train": batches(0), "val": batches(1), "test": batches(2)}
    t.fit(made, loaders["train"], loaders["val"])
    t.test(made, loaders["test"], verbose=False)
    with (tmp_path / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    for stage, times in (("train", 2), ("val", 2), ("test", 1)):
        # The last batch has 6 samples, the others 8: a mean over batches would be another number.
        loss, accuracy = naive(made.network, loaders[stage])
        assert [float(row[f"{stage}/loss"]) for row in table if row[f"{stage}/loss"]] == pytest.approx([loss] * times)
        found = [float(row[f"{stage}/accuracy"]) for row in table if row[f"{stage}/accuracy"]]
        assert found == pytest.approx([accuracy] * times)


def test_stages_and_epochs_do_not_mix():
    made = module(metrics={"accuracy": MulticlassAccuracy(3, average="micro")}, optimizer=sgd)
    seen = []

    class Look(L.Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            seen.append(naive(pl_module.network, batches(1))[1])

    logged = []

    class Logged(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            logged.append(float(trainer.callback_metrics["val/accuracy"]))

    t = trainer(Look(), Logged(), max_epochs=4, num_sanity_val_steps=0)
    t.fit(made, batches(0), batches(1))
    assert logged == pytest.approx(seen)
    assert len(set(seen)) > 1


def test_the_metric_objects_given_are_not_touched():
    metric = MulticlassAccuracy(3, average="micro")
    made = module(metrics={"accuracy": metric})
    trainer(max_epochs=1).fit(made, batches(), batches(1))
    assert metric.update_count == 0


# Checkpoints


def test_checkpoint_is_read_without_code_and_holds_no_module(tmp_path):
    made = module(metrics={"accuracy": MulticlassAccuracy(3)})
    t = trainer(max_epochs=1)
    t.fit(made, batches())
    path = tmp_path / "it.ckpt"
    t.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert "hyper_parameters" not in checkpoint
    assert list(made.hparams) == []
    assert set(checkpoint["state_dict"]) == {f"network.{name}" for name in made.network.state_dict()}
    # The dense network takes it as it is.
    weights = {name.removeprefix("network."): tensor for name, tensor in checkpoint["state_dict"].items()}
    MLP(6, 3, hidden=(8,)).load_state_dict(weights)


def test_forward_is_the_network():
    made, x = module(), torch.randn(4, 6)
    assert torch.equal(made(x), made.network(x))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"network": "MLP"}, TypeError, r"`network` is what is trained and must be a Module, such as MLP\(64, 10\)"),
        ({"network": MLP}, TypeError, "`network` .* got the class MLP"),
        ({"loss": F.cross_entropy}, TypeError, "`loss` is what is minimised"),
        ({"lr_interval": "batch"}, ValueError, "`lr_interval` .* one of 'step', 'epoch'; got 'batch'"),
        ({"metrics": {"accuracy": F.cross_entropy}}, TypeError, r"`metrics\['accuracy'\]` is a metric"),
    ],
)
def test_what_is_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        MaskedModule(**{"network": MLP(6, 3), "loss": nn.CrossEntropyLoss()} | arguments)
