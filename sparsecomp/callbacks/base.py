"""What every pruning callback shares: it holds masks through a Lightning training and its checkpoints."""

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sparsecomp._checks import check_instance
from sparsecomp._rendering import render
from sparsecomp.averaging import averaged_tensors
from sparsecomp.callbacks.live import LiveConnections
from sparsecomp.callbacks.position import Position
from sparsecomp.masks import MaskStore, count_pruned
from sparsecomp.probe import Probe
from sparsecomp.selection import Selection, selection_table

_STATE_VERSION = 1
_SHARDED = (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy)


@dataclass(frozen=True)
class PruningEvent:
    """What one pruning event did.

    Attributes:
        position: Its place in the schedule, in `unit`.
        unit: "step", "epoch" or "fraction".
        step: Completed optimizer steps when it happened.
        epoch: Completed epochs when it happened.
        target: Total sparsity asked for.
        before: Sparsity before.
        after: Sparsity after.
        layers: Parameter name to its sparsity before and after.
        rewound: Whether kept weights went back to the rewind point.
        seconds: What its parts took: statistics (with gradients), scores, allocation and refit; not part of
            equality, and not kept in checkpoints.
    """

    position: float
    unit: str
    step: int
    epoch: int
    target: float
    before: float
    after: float
    layers: dict[str, tuple[float, float]]
    rewound: bool
    seconds: dict[str, float] = field(default_factory=dict, compare=False)


class PruningBase(L.Callback, ABC):
    """Holds masks on any LightningModule: weights stay plain parameters, zeroed in place.

    Gradients of masked weights are zeroed before clipping, optimizer state once per event, so that masked weights stay
    exactly zero; after the first step that follows an event, and at the end of each epoch, this is verified, and where
    an optimizer moves them all the same (LBFGS, Muon), they are zeroed after each of its steps too, with a warning.
    Masks, events and all that a resume needs are part of the checkpoint. Validation, testing and the sanity check never
    prune. A second `fit` of the same network goes on with its masks; another network starts anew. One pruner a Trainer.

    A subclass gives `_act`, which is called before the first and after each training batch.

    Args:
        selection: What is prunable; the default of `Selection` if None.
        probe: What the input, the output and the loss of the module are; `Probe()` takes (x, y) batches.
    """

    _store: MaskStore | None
    _loaded: dict[str, Any] | None  # a checkpoint's state, until fit starts
    _loaded_into: weakref.ref[L.LightningModule] | None  # the network that had the checkpoint, None if not known
    _set_up_for: weakref.ref[L.LightningModule] | None  # the network of the latest `setup`
    _events: list[PruningEvent]
    _handles: list[RemovableHandle]
    _live: LiveConnections
    _logged_at: int  # the step at which the sparsity was logged last
    _verify_after: float  # the step after which zeros are to be looked at

    def __init__(self, selection: Selection | None = None, probe: Probe | None = None) -> None:
        if selection is not None:
            check_instance("selection", selection, "what is prunable", Selection, "Selection(exclude=['head'])")
        if probe is not None:
            check_instance("probe", probe, "what the input and output of the module are", Probe, "Probe(batches=8)")
        self.selection = selection or Selection()
        self.probe = probe or Probe()
        self._set_up_for = None
        self._forget()

    @property
    def masks(self) -> Mapping[str, Tensor]:
        """Parameter name to bool tensor, True = kept; empty before the first fit."""
        return self._store.masks if self._store is not None else (self._loaded or {}).get("masks", {})

    @property
    def sparsity(self) -> float:
        """Fraction of the selected weights that is masked, in [0, 1]: the nominal sparsity."""
        pruned, total = (sum(column) for column in zip((0, 0), *self.counts.values(), strict=True))
        return pruned / total if total else 0.0

    @property
    def layer_sparsity(self) -> dict[str, float]:
        """Parameter name to the fraction of it that is masked."""
        return {name: pruned / total for name, (pruned, total) in self.counts.items()}

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """Parameter name to how many of its weights are masked, and how many there are."""
        if self._store is not None:
            return self._store.counts()
        return count_pruned(self.masks, (self._loaded or {}).get("selected", ()))

    @property
    def effective_sparsity(self) -> float:
        """Fraction of the selected weights on no path from an input to an output; NaN where that is not known.

        `effective_sparsity_reason` says why: the network cannot be traced, or no fit began yet.
        """
        return math.nan if self._store is None else self._live.sparsity(self._selected_masks)

    @property
    def effective_sparsity_reason(self) -> str:
        """Why `effective_sparsity` is NaN; empty where it is known."""
        return self._live.reason

    @property
    def _selected_masks(self) -> dict[str, Tensor]:
        return {entry.name: self._held.masks[entry.name] for entry in self._held.selected}

    @property
    def events(self) -> list[PruningEvent]:
        """What happened so far, in order."""
        return list(self._events)

    @property
    def state_key(self) -> str:
        """The same for every pruner and setting, so that no checkpoint forgets its masks."""
        return "sparsecomp.pruning"

    @abstractmethod
    def _act(self, trainer: L.Trainer, pl_module: L.LightningModule, position: Position) -> None:
        """Do what is due at `position`."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse what cannot hold masks. A checkpoint may be loaded next: it must arrive untouched."""
        self._logged_at = -1
        if is_overridden("configure_callbacks", pl_module) and any(
            isinstance(callback, PruningBase) for callback in _as_list(pl_module.configure_callbacks())
        ):
            raise ValueError(
                f"{type(pl_module).__name__}.configure_callbacks returns a pruner, and Lightning lets it replace one of "
                "the Trainer without a word; give the pruner to the Trainer (or to `pruning:` in the config) instead."
            )
        if isinstance(trainer.strategy, _SHARDED):
            raise ValueError(
                f"{type(trainer.strategy).__name__} splits parameters over devices, and masks need whole ones; use "
                "strategy='ddp' or a single device."
            )
        self._release()
        self._set_up_for = weakref.ref(pl_module)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the masks: new ones, those of the last fit of this network, or those of the checkpoint."""
        store = MaskStore(pl_module, self.selection)
        _refuse_sparse_adam(trainer, store)
        if self.masks and not self._made_for(pl_module):
            rank_zero_info("Another network than the one these masks were made for: its pruning starts anew.")
            self._forget()
        carried = self.masks
        if carried:
            store.load_state_dict(carried)
        self._store, self._loaded = store, None
        rank_zero_info(render(selection_table(store.selected, pl_module)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Hold the masks from here on, and do what is due before the first step."""
        self._held.attach()
        self._live = LiveConnections.of(trainer, pl_module, self.probe)
        self._hold_everywhere(trainer, pl_module)
        self._act(trainer, pl_module, Position.of(trainer))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """In manual optimization the module clips by itself, before the hook that follows."""
        if not pl_module.automatic_optimization:
            self._held.mask_grads_()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Mask gradients before they are clipped, or pruned coordinates would enter the norm."""
        self._held.mask_grads_()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """See that zeros held, then do what is due: on the last batch of an epoch that is before validation."""
        epoch_complete = trainer.is_last_batch
        if epoch_complete or trainer.global_step > self._verify_after:
            self._verify(trainer)
        self._act(trainer, pl_module, Position.of(trainer, epoch_complete=epoch_complete))

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the sparsity, once an epoch, with the validation metrics that it explains."""
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and trainer.is_last_batch:
            self._log_sparsity(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the sparsity where no validation just did: a row of its own would move the logger's step."""
        if self._logged_at != trainer.global_step:
            self._log_sparsity(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the network sparse, also after an average was copied into it."""
        self._held.apply_()
        self._release()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Let go of the network."""
        self._release()

    def state_dict(self) -> dict[str, Any]:
        """Masks and events; plain containers and tensors, which `torch.load(weights_only=True)` reads."""
        if self._store is None:
            return self._loaded or {}
        # Without their seconds: the checkpoint of a resumed training is that of the uninterrupted one.
        events = [asdict(event) | {"seconds": {}} for event in self._events]
        return {
            "version": _STATE_VERSION,
            "masks": self._store.state_dict(),
            "selected": [entry.name for entry in self._store.selected],
            "events": events,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the network is there to hold it.

        Raises:
            ValueError: If the state is of a newer version.
        """
        if state_dict["version"] > _STATE_VERSION:
            raise ValueError(
                f"the pruning state of this checkpoint has version {state_dict['version']}, and this sparsecomp reads up "
                f"to {_STATE_VERSION}; use the newer sparsecomp it was written with."
            )
        self._forget()
        self._loaded = state_dict
        self._loaded_into = self._set_up_for
        self._events = [PruningEvent(**event) for event in state_dict["events"]]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded_into": None, "_set_up_for": None, "_handles": []}

    @property
    def _held(self) -> MaskStore:
        if self._store is None:
            raise RuntimeError("masks exist from the start of `Trainer.fit` on.")
        return self._store

    def _forget(self) -> None:
        """Be as before the first fit."""
        self._store = None
        self._loaded = None
        self._loaded_into = None
        self._live = LiveConnections(None, "No fit has begun.")
        self._events = []
        self._handles = []
        self._verify_after = float("inf")
        self._logged_at = -1

    def _release(self) -> None:
        if self._store is not None:
            self._store.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _made_for(self, pl_module: L.LightningModule) -> bool:
        """Whether the masks at hand are those of this network."""
        if self._store is not None:
            layers = {id(layer) for layer in pl_module.modules()}
            return any(id(entry.owner) in layers for entry in self._store.selected)
        return self._loaded_into is None or self._loaded_into() is pl_module

    def _log_sparsity(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("pruning/sparsity", self.sparsity, on_step=False, on_epoch=True, sync_dist=True)
        if self._live.graph is not None:
            effective = self.effective_sparsity
            pl_module.log("pruning/effective_sparsity", effective, on_step=False, on_epoch=True, sync_dist=True)
        self._logged_at = trainer.global_step

    def _hold_everywhere(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Zero masked places of the weights, of what optimizers remember and of averages; verify after the next step."""
        self._held.apply_()
        self._held.zero_optimizer_state_(trainer.optimizers)
        for tensors in averaged_tensors(pl_module, trainer):
            self._held.apply_to_(tensors)
        self._verify_after = trainer.global_step

    def _verify(self, trainer: L.Trainer) -> None:
        self._verify_after = float("inf")
        revived = self._held.revived()
        if not revived:
            return
        self._held.apply_()
        if self._handles:
            return
        for optimizer in trainer.optimizers:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._held.apply_()))
        rank_zero_warn(
            f"Masked weights of {', '.join(revived)} moved although their gradients are zero "
            f"({', '.join(type(optimizer).__name__ for optimizer in trainer.optimizers)}); from now on they are zeroed "
            "after each optimizer step."
        )


def _as_list(callbacks: Any) -> list[L.Callback]:
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _refuse_sparse_adam(trainer: L.Trainer, store: MaskStore) -> None:
    names = {id(entry.parameter): entry.name for entry in store.selected}
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.SparseAdam):
            held = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
            if held:
                raise TypeError(
                    f"SparseAdam takes sparse gradients only, which hold no mask, and it has {', '.join(held)}; give these "
                    "parameters to Adam, or leave them out with Selection(exclude=...)."
                )
