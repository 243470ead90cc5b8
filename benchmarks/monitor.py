"""What CompositionalityMonitor costs: epochs of digits in turns with and without a look at the network."""

import statistics
import time

import lightning as L
import torch
from torch import nn

from sparsecomp.callbacks.compositionality import CompositionalityMonitor
from sparsecomp.data import DigitsDataModule
from sparsecomp.models import MLP, MaskedModule, SmallConvNet

_WARMUP = 4


class _Clock(L.Callback):
    """When each epoch began."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.times.append(time.perf_counter())


def _epochs(network: nn.Module, rounds: int) -> tuple[float, float]:
    """Seconds of an epoch without a look, and of a look: medians, the latter of neighbouring epochs' differences."""
    clock = _Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2 * rounds + _WARMUP + 1,
        callbacks=[clock, CompositionalityMonitor(every_n_epochs=2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(MaskedModule(network, nn.CrossEntropyLoss()), DigitsDataModule())
    seconds = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)][_WARMUP:]
    pairs = list(zip(seconds[::2], seconds[1::2], strict=False))
    return statistics.median(plain for plain, _ in pairs), statistics.median(after - plain for plain, after in pairs)


def rows(rounds: int) -> list[tuple[str, float, float, float]]:
    """(what, share of an epoch at the default interval, the limit, share with a look after every epoch)."""
    torch.manual_seed(0)
    work = {
        "MLP 64-128-128-10": MLP(64, 10),
        "conv net 1-16-32": SmallConvNet(1, 10, image_size=8),
    }
    interval = CompositionalityMonitor().every_n_epochs
    results = []
    for name, network in work.items():
        epoch, look = _epochs(network, rounds)
        share = look / epoch
        results.append((f"compositionality monitor on digits, {name}", share / interval, 0.05, share))
    return results
