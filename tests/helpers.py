"""Small modules and data that many tests use."""

import copy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    """A user's module: plain network, plain optimizer, nothing of ours."""

    def __init__(self, net, optimizer=None, scheduler=None):
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
        self.make_scheduler = scheduler

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


def mlp(seed=0, norm=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32)] if norm else [nn.Linear(16, 32)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, 4))


def loader(n=32, d=16, c=4, batch_size=8):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g)
    return DataLoader(TensorDataset(x, torch.randint(0, c, (n,), generator=g)), batch_size=batch_size)


def trainer(*callbacks, **options):
    """A quiet CPU trainer without files."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(accelerator="cpu", callbacks=list(callbacks), **{"devices": 1, "max_epochs": 4} | quiet | options)


class Watch(L.Callback):
    """Calls functions of (trainer, module) at the named hooks."""

    def __init__(self, **hooks):
        for name, function in hooks.items():
            setattr(self, name, lambda trainer, module, *_, call=function: call(trainer, module))


def clone(state):
    """A copy of nested containers that shares no tensor with them."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: clone(value) for key, value in state.items()}
    return [clone(value) for value in state] if isinstance(state, list | tuple) else copy.deepcopy(state)


def assert_same(left, right, path="it"):
    """Equal bit for bit, through nested containers; NaN equals NaN."""
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), path
        assert bool(((left == right) | (left.isnan() & right.isnan())).all()), path
    elif isinstance(left, Mapping):
        assert list(left) == list(right), path
        for key in left:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), path
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert left == right, path


def masked_values(module, masks):
    """All weights that the masks remove, joined."""
    parameters = dict(module.named_parameters())
    return torch.cat([parameters[name].detach()[~mask] for name, mask in masks.items()])


def kept_values(tensors, masks):
    """Name to the values that the masks keep."""
    return {name: tensors[name].detach()[mask] for name, mask in masks.items()}


def on_two_ranks(work, folder):
    """`work(folder, rank)` of a test module on rank 0 here and on rank 1 in a process of its own: (ours, theirs)."""
    file = Path(sys.modules[work.__module__].__file__)
    script = (
        f"import sys, torch; sys.path[:0] = sys.argv[2:]; torch.set_num_threads(1); import {file.stem} as tests; "
        f"torch.save(tests.{work.__name__}(sys.argv[1], 1), sys.argv[1] + '/1.pt')"
    )
    command = [sys.executable, "-c", script, str(folder), str(file.parent), str(Path(__file__).parent)]
    other = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        ours = work(folder, 0)
        said = other.communicate(timeout=90)[0]
    finally:
        other.kill()
    assert other.returncode == 0, said
    return ours, torch.load(folder / "1.pt", weights_only=True)
