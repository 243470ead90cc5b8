"""A LightningModule from a network, a loss, an optimizer and metrics, all of which a config can name."""

import inspect
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from sparsecomp._checks import check_choice, check_instance


class MaskedModule(L.LightningModule):
    """Trains a network on batches (x, y) and logs loss and metrics as `train/`, `val/` and `test/`.

    Masks are not here but in the pruning callback: this is a plain LightningModule, and so may yours be.

    Args:
        network: Maps x to predictions.
        loss: Maps (predictions, y) to a scalar.
        optimizer: Called with the parameters; AdamW with its defaults if None. Where the optimizer has a fused
            implementation and nothing is said, it is used: unfused ones slow down on exact zeros. Not with gradient
            clipping in mixed precision, which Lightning refuses.
        lr_scheduler: Called with the optimizer; constant learning rate if None.
        lr_interval: Whether the scheduler advances each "step" or each "epoch".
        metrics: Name to torchmetrics.Metric of (predictions, y).

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `lr_interval` is something else.

    >>> module = MaskedModule(nn.Linear(4, 2), nn.CrossEntropyLoss())
    >>> module(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        network: nn.Module,
        loss: nn.Module,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: str = "epoch",
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        super().__init__()
        # No save_hyperparameters: a module among them makes checkpoints that weights_only=True refuses.
        self.network = check_instance("network", network, "what is trained", nn.Module, "MLP(64, 10)")
        self.loss = check_instance("loss", loss, "what is minimised", nn.Module, "torch.nn.CrossEntropyLoss()")
        self._make_optimizer = optimizer or torch.optim.AdamW
        self._make_scheduler = lr_scheduler
        self._lr_interval = check_choice("lr_interval", lr_interval, "when the scheduler advances", ("step", "epoch"))
        for name, metric in (metrics or {}).items():
            check_instance(f"metrics[{name!r}]", metric, "a metric", Metric, "torchmetrics.Accuracy(...)")
        collection = MetricCollection(dict(metrics or {}))
        self.train_metrics = collection.clone("train/")
        self.val_metrics = collection.clone("val/")
        self.test_metrics = collection.clone("test/")

    def forward(self, x: Tensor) -> Tensor:
        """The network's predictions."""
        predictions: Tensor = self.network(x)
        return predictions

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of a training batch."""
        return self._step(batch, "train", self.train_metrics)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and metrics of a validation batch."""
        self._step(batch, "val", self.val_metrics)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and metrics of a test batch."""
        self._step(batch, "test", self.test_metrics)

    def configure_optimizers(self) -> Any:
        """The optimizer, fused where it may be, and the scheduler if there is one."""
        optimizer = self._make_optimizer(self.parameters())
        if self._may_fuse(optimizer):
            accepted = inspect.signature(type(optimizer)).parameters
            settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
            optimizer = type(optimizer)(self.parameters(), **settings | {"fused": True})
        if self._make_scheduler is None:
            return optimizer
        scheduler = {"scheduler": self._make_scheduler(optimizer), "interval": self._lr_interval}
        monitor = getattr(scheduler["scheduler"], "monitor", None)  # set by lightning.pytorch.cli.ReduceLROnPlateau
        return {"optimizer": optimizer, "lr_scheduler": scheduler | ({"monitor": monitor} if monitor else {})}

    def _may_fuse(self, optimizer: torch.optim.Optimizer) -> bool:
        defaults = optimizer.defaults
        if "fused" not in defaults or defaults["fused"] is not None or defaults.get("foreach"):
            return False
        if defaults.get("differentiable") or isinstance(defaults.get("lr"), Tensor):
            return False
        clipped = self._trainer is not None and bool(self.trainer.gradient_clip_val)
        return not (clipped and "mixed" in str(self.trainer.precision))

    def _step(self, batch: tuple[Tensor, Tensor], stage: str, metrics: MetricCollection) -> Tensor:
        x, y = batch
        predictions = self(x)
        loss: Tensor = self.loss(predictions, y)
        metrics.update(predictions.detach(), y)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=len(x))
        self.log_dict(metrics, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=len(x))
        return loss
