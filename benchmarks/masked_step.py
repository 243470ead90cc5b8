"""A masked training step in Lightning against a dense one, and against the hooks of torch.nn.utils.prune."""

import copy
import logging
import statistics
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from sparsecomp import Magnitude, OneShot, Pruning
from sparsecomp.data import TensorBatches
from sparsecomp.models import MLP, MaskedModule, SmallConvNet

SPARSITY = 0.9
_STEPS = 16  # of a short training
_WARMUP = 4  # of them that do not count


class _Clock(L.Callback):
    """Seconds from the start of one batch to that of the next."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [b - a for a, b in zip(self.starts, self.starts[1:], strict=False)][_WARMUP:]


def _contestants(network: nn.Module) -> dict[str, tuple[L.LightningModule, list[L.Callback]]]:
    hooked = copy.deepcopy(network)
    layers = [(layer, "weight") for layer in hooked.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    torch_prune.global_unstructured(layers, torch_prune.L1Unstructured, amount=SPARSITY)
    networks = {"dense": copy.deepcopy(network), "masked": copy.deepcopy(network), "hooks": hooked}
    pruning = Pruning(Magnitude(), OneShot(SPARSITY, at=0))
    return {
        name: (MaskedModule(net, nn.CrossEntropyLoss()), [pruning] if name == "masked" else [])
        for name, net in networks.items()
    }


def _train(module: L.LightningModule, callbacks: list[L.Callback], batches: TensorBatches) -> list[float]:
    """Seconds of the steps of one short training."""
    clock = _Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=_STEPS,
        max_epochs=-1,
        callbacks=[clock, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)
    return clock.seconds()


def rows(rounds: int) -> list[tuple[str, float, float, float]]:
    """(what, ratio to dense, the limit, ratio to dense of hooks); trainings of 16 steps in turns, AdamW fused."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    mlp = MLP(256, 10, hidden=(1024, 1024, 1024))
    conv = SmallConvNet(3, 10, image_size=32, channels=(32, 64))
    work: dict[str, tuple[nn.Module, Tensor, int, float]] = {
        "MLP 256-1024-1024-1024-10, batch 64": (mlp, torch.randn(64 * 20, 256), 64, 1.10),
        "MLP 256-1024-1024-1024-10, batch 512": (mlp, torch.randn(512 * 20, 256), 512, 1.03),
        "conv net 3-32-64 on 32 x 32, batch 32": (conv, torch.randn(32 * 20, 3, 32, 32), 32, 1.03),
    }
    results = []
    for what, (network, x, size, limit) in work.items():
        batches = TensorBatches(x, torch.randint(10, (len(x),)), batch_size=size)
        contestants = _contestants(network)
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        names = list(contestants)
        for index in range(max(2, rounds // 10)):
            for name in names[index % 3 :] + names[: index % 3]:
                seconds[name] += _train(*contestants[name], batches)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        ratios = (median["masked"] / median["dense"], median["hooks"] / median["dense"])
        results.append((f"masked step, {what}", ratios[0], limit, ratios[1]))
    return results
