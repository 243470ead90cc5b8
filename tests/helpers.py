"""Small modules and data that many tests use."""

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

    def test_step(self, batch, _):
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
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **{"max_epochs": 4} | quiet | options)
