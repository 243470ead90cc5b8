"""Logs metrics of the network while it trains."""

from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils._pytree import tree_leaves

import sparsecomp.metrics
from sparsecomp._checks import check_instance, check_int
from sparsecomp.callbacks.base import PruningBase
from sparsecomp.callbacks.live import LiveConnections
from sparsecomp.functions import TargetFunction
from sparsecomp.metrics import NetworkMetric, NetworkStructure, Part, watch
from sparsecomp.metrics.watching import watched_layers
from sparsecomp.probe import Probe

_BATCHES = 4


class CompositionalityMonitor(L.Callback):
    """Logs metrics of any LightningModule as `compositionality/<name>`, such as `compositionality/effective_fan_in`.

    They are taken on the first batches of the first validation loader, or of the training loader where there is none,
    and logged with the validation metrics, or at the end of the training epoch. The module is looked at in eval mode and
    left as it was: modes, buffers, gradients and random states. Masks are those of the Trainer's pruner, or else the
    nonzero weights. A metric that cannot be computed is logged as NaN, and the reason is said once.

    Without a regression target none of the metrics notices a wrong function; without ground truth they describe
    sparsity, not compositionality.

    Args:
        metrics: What to log; by default every metric of the package, those that need ground truth where there is some.
        every_n_epochs: Log after each n-th epoch, and after the last one of `max_epochs`, >= 1. The default costs under 5% of
            the time of an epoch even on the small digits.
        probe: What the input and the output of the module are, and how many batches are looked at; 4 by default.
        function: The target function, the ground truth; by default the data module's `function`, if it is one.

    Raises:
        ValueError: If `every_n_epochs` is not positive, or a metric is given twice.
        TypeError: If an argument has the wrong type.

    >>> CompositionalityMonitor(every_n_epochs=2).every_n_epochs
    2
    """

    def __init__(
        self,
        metrics: Sequence[NetworkMetric] | None = None,
        every_n_epochs: int = 10,
        probe: Probe | None = None,
        function: TargetFunction | None = None,
    ) -> None:
        meaning = "the number of epochs from one look at the network to the next"
        self.every_n_epochs = check_int("every_n_epochs", every_n_epochs, meaning, minimum=1)
        self.probe = check_instance("probe", probe or Probe(_BATCHES), "what the input is", Probe, "Probe(batches=4)")
        if function is not None:
            check_instance("function", function, "the ground truth", TargetFunction, "Tree()")
        self.function = function
        self.metrics = None if metrics is None else list(metrics)
        for metric in self.metrics or ():
            check_instance("metrics", metric, "what to log", NetworkMetric, "[EffectiveFanIn()]")
        labels = [metric.label() for metric in self.metrics or ()]
        if len(set(labels)) < len(labels):
            raise ValueError(f"`metrics` is what to log, each metric once; got {', '.join(labels)}. Leave one out.")
        self._active: list[NetworkMetric] = []
        self._truth: TargetFunction | None = None
        self._live = LiveConnections(None, "no fit has begun.")
        self._said: set[str] = set()
        self._logged_at = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Trace the network, and see what is known of its target."""
        self._logged_at, self._said = -1, set()
        found = getattr(trainer.datamodule, "function", None)  # type: ignore[attr-defined]
        self._truth = self.function or (found if isinstance(found, TargetFunction) else None)
        self._active = self._default() if self.metrics is None else self.metrics
        for metric in self._active:
            metric.to(pl_module.device)
        needed = any(Part.CONNECTIVITY in metric.needs for metric in self._active)
        self._live = LiveConnections.of(trainer, pl_module, self.probe) if needed else self._live

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log with the validation metrics."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and trainer.is_last_batch:
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log where no validation just did."""
        if self._logged_at != trainer.global_step:
            self._log(trainer, pl_module)

    def _default(self) -> list[NetworkMetric]:
        metrics: list[NetworkMetric] = [getattr(sparsecomp.metrics, name)() for name in sparsecomp.metrics.MEMBERS]
        if self._truth is not None:
            return metrics
        left_out = [metric.label() for metric in metrics if Part.GROUND_TRUTH in metric.needs]
        rank_zero_info(f"No target function with a known graph is given; left out are {', '.join(left_out)}.")
        return [metric for metric in metrics if Part.GROUND_TRUTH not in metric.needs]

    def _log(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._logged_at = trainer.global_step
        epoch = trainer.current_epoch + 1
        if epoch % self.every_n_epochs and epoch != trainer.max_epochs:
            return
        watch(pl_module, self._active, _loader(trainer), self._structure(trainer, pl_module), self.probe)
        for metric in self._active:
            name = f"compositionality/{metric.label()}"
            pl_module.log(name, metric.compute(), on_step=False, on_epoch=True, sync_dist=True)
            if metric.reason and name not in self._said:
                rank_zero_info(f"{name} is NaN: {metric.reason}")
                self._said.add(name)
            metric.reset()

    def _structure(self, trainer: L.Trainer, pl_module: L.LightningModule) -> NetworkStructure:
        weights = {name: layer.weight.detach() for name, layer in watched_layers(pl_module).items()}
        return NetworkStructure(weights, _masks(trainer, weights), self._live.graph, self._live.reason, self._truth)


def _masks(trainer: L.Trainer, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, PruningBase):
            return {name: callback.masks[name] for name in callback.counts}
    return {name: weight != 0 for name, weight in weights.items()}


def _loader(trainer: L.Trainer) -> Iterable[Any]:
    """The first validation loader, or the first training loader."""
    loaders = (*tree_leaves(trainer.val_dataloaders), *tree_leaves(trainer.train_dataloader))
    return next((loader for loader in loaders if loader is not None), ())
