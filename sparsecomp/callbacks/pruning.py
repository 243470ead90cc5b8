"""Prune any LightningModule on a schedule while it trains. The whole flow of an event is here."""

from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from sparsecomp._checks import check_choice, check_instance, check_number
from sparsecomp._stopwatch import Stopwatch
from sparsecomp.allocation import Allocation, resolve_allocation
from sparsecomp.allocation.global_ import Global
from sparsecomp.callbacks.base import PruningBase, PruningEvent
from sparsecomp.callbacks.position import Position
from sparsecomp.criteria import Criterion, ScoreContext
from sparsecomp.masks import MaskStore
from sparsecomp.planning import Plan, make_plan
from sparsecomp.probe import Probe
from sparsecomp.rewinding import Rewind, Snapshot
from sparsecomp.schedules import Schedule
from sparsecomp.selection import Selection
from sparsecomp.tickets import save_ticket, unused_path

_L1_UNTIL = "the sparsity with which the L1 warm-up ends"


class Pruning(PruningBase):
    """Zeroes the weights that `criterion` ranks lowest, as many as `schedule` says, and keeps them zero.

    An event of an epoch schedule happens on the epoch's last batch, after its optimizer step and before validation, so
    that validation metrics and monitored checkpoints describe the pruned network. Masks are nested: what was pruned
    never returns. With `rewind`, each event puts kept weights back to the rewind point and training goes on from there;
    an event at the very end of training prunes without rewinding, so that the network left in memory is the trained
    one. Under `fast_dev_run` an event is planned, which runs the criterion, and not carried out. A run with rewinding
    writes `ticket.safetensors` (masks and rewind weights) and `trained.safetensors` (masks and trained weights) to the
    Trainer's `log_dir`.

    Args:
        criterion: What to keep.
        schedule: When to prune and to what total sparsity.
        allocation: Scores to masks: an `Allocation`, or "global", "layerwise" or "erk".
        selection: What is prunable; the default of `Selection` if None.
        rewind: When to take the snapshot that events go back to, and what they restore; None does not rewind.
        target: Whether the schedule's sparsity is the "nominal" one, the fraction of weights removed, or the "effective"
            one, which counts as removed also what lies on no path from an input to an output; such dangling
            connections are then removed, and the allocation is global over single weights.
        probe: What the input, the output and the loss of the module are, for criteria that look at data; `Probe()` takes
            (x, y) batches.
        l1: Coefficient of an L1 warm-up, >= 0: l1 * sum |w| over the selected weights is minimised with the loss, by
            adding l1 * sign(w) to each gradient before it is clipped. 0 for none.
        l1_until: The schedule's sparsity with which the warm-up ends, in (0, 1]. Without rewinding, L1 until 0.8 and
            then magnitude alone did best on the compositional functions of tanh units in our experiments.

    Raises:
        ValueError: If a value is out of its range, the schedule's sparsity falls, or the rewind point comes after the
            first event.
        TypeError: If an argument has the wrong type.

    >>> from sparsecomp.criteria.magnitude import Magnitude
    >>> from sparsecomp.schedules.polynomial import Polynomial
    >>> pruning = Pruning(Magnitude(), Polynomial(0.9, begin=0, end=6))
    >>> trainer = L.Trainer(max_epochs=10, callbacks=[pruning], logger=False, enable_checkpointing=False)
    """

    ticket_files: dict[str, str]
    _last_event: float | None
    _last_step: int
    _seed: int | None
    _snapshot: Snapshot | None

    def __init__(
        self,
        criterion: Criterion,
        schedule: Schedule,
        allocation: Allocation | str = "global",
        selection: Selection | None = None,
        rewind: Rewind | None = None,
        target: Literal["nominal", "effective"] = "nominal",
        probe: Probe | None = None,
        l1: float = 0.0,
        l1_until: float = 0.8,
    ) -> None:
        self.criterion = check_instance("criterion", criterion, "what to keep", Criterion, "Magnitude()")
        self.schedule = check_instance("schedule", schedule, "when to prune", Schedule, "OneShot(0.9, at=3)")
        self.allocation = resolve_allocation(allocation)
        if rewind is not None:
            check_instance("rewind", rewind, "what events go back to", Rewind, "Rewind(at=0)")
        self.rewind = rewind
        self.target = check_choice("target", target, "what the schedule's sparsity counts", ("nominal", "effective"))
        if target == "effective" and (type(self.allocation) is not Global or self.allocation.granularity != "weight"):
            raise ValueError(
                f"`target`='effective' needs the global allocation of single weights; got {self.allocation!r}."
            )
        self.l1 = _check_l1(l1)
        self.l1_until = check_number("l1_until", l1_until, _L1_UNTIL, "in (0, 1]")
        if not 0.0 < self.l1_until <= 1.0:
            raise ValueError(f"`l1_until` is {_L1_UNTIL} and must be in (0, 1]; got {l1_until!r}.")
        super().__init__(selection, probe)
        if not schedule.is_monotone:
            raise ValueError("`schedule` must not fall: what is pruned here never returns. Use rising sparsities.")
        if rewind is not None and rewind.unit == schedule.unit and rewind.at > schedule.positions[0]:
            raise ValueError(
                f"`rewind.at` is the {rewind.unit} of the rewind point and must not come after the first pruning event at "
                f"{schedule.positions[0]}; got {rewind.at}."
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the masks; a training that is not resumed runs through the schedule from its beginning."""
        super().on_fit_start(trainer, pl_module)
        if self._seed is None:
            # Rank 0's, and part of the state: a random criterion is the same on all ranks and after a resume.
            self._seed = int(trainer.strategy.broadcast(torch.initial_seed()))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Do what is due before the first step."""
        if trainer.global_step == 0:
            self._last_event = None
        if self.rewind is not None and self._snapshot is None:
            position = Position.of(trainer).in_unit(self.rewind.unit)
            if position > self.rewind.at:
                raise ValueError(
                    f"the rewind point, {self.rewind.unit} {self.rewind.at}, is over at {self.rewind.unit} {position} and "
                    "the checkpoint holds no snapshot of it; resume a run that was started with rewinding, or set "
                    "`rewind.at` to a later place."
                )
        super().on_train_start(trainer, pl_module)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Add the L1 warm-up to the gradients of the weights that this optimizer moves, then mask."""
        if self.l1 and (self._events[-1].target if self._events else 0.0) < self.l1_until:
            _add_l1_(self._held, optimizer, self.l1)
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the ticket and the trained sparse network on disk."""
        super().on_fit_end(trainer, pl_module)
        if self._snapshot is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if self._events and self._events[-1].rewound and self._events[-1].step == trainer.global_step:
                rank_zero_warn(
                    "Training ended right after a rewind: the network in memory is the rewound, untrained one."
                )
            self._save_tickets(trainer, pl_module, self._snapshot)

    def state_dict(self) -> dict[str, Any]:
        """Masks, events, the place in the schedule and the rewind snapshot."""
        state = super().state_dict()
        if self._store is None:
            return state
        snapshot = None if self._snapshot is None else self._snapshot.state_dict()
        place = {"last_event": self._last_event, "unit": self.schedule.unit, "seed": self._seed, "snapshot": snapshot}
        return state | place

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the network is there to hold it."""
        super().load_state_dict(state_dict)
        # A state without these is one of a pruner without a schedule; its masks are held all the same.
        self._seed = state_dict.get("seed")
        if state_dict.get("unit") == self.schedule.unit:
            self._last_event = state_dict["last_event"]
        if state_dict.get("snapshot") is not None:
            self._snapshot = Snapshot.from_state_dict(state_dict["snapshot"])

    def _forget(self) -> None:
        super()._forget()
        self._last_event = None
        self._last_step = -1
        self._seed = None
        self._snapshot = None
        self.ticket_files = {}

    def _act(self, trainer: L.Trainer, pl_module: L.LightningModule, position: Position) -> None:
        """Take the snapshot and run the event, where one is due."""
        if self.schedule.unit == "fraction" and position.step == self._last_step:
            return  # gradients are still accumulating
        self._last_step = position.step
        if self.rewind is not None and self._snapshot is None and position.in_unit(self.rewind.unit) >= self.rewind.at:
            self._snapshot = Snapshot.take(pl_module, trainer.optimizers, _schedulers(trainer))
        self._run_due(trainer, pl_module, position)

    def _run_due(self, trainer: L.Trainer, pl_module: L.LightningModule, position: Position) -> None:
        """Run the schedule's event, where one is due."""
        event = self.schedule.last_event(position.in_unit(self.schedule.unit))
        if event is None or (self._last_event is not None and event <= self._last_event):
            return
        self._prune(trainer, pl_module, position, event)
        self._last_event = event

    @property
    def _rewinds_each_event(self) -> bool:
        return self.rewind is not None

    def _prune(self, trainer: L.Trainer, pl_module: L.LightningModule, position: Position, event: float) -> None:
        store, target, stopwatch = self._held, self.schedule.sparsity(event), Stopwatch()
        plan = None
        if target > store.sparsity:
            self._check_snapshot(event)
            seed = ((self._seed or 0) + len(self._events)) % 2**63
            data = trainer.train_dataloader if self.criterion.needs else None
            context = ScoreContext(
                pl_module,
                store.weights,
                store.masks,
                seed,
                data,
                self.probe.loss,
                store.selected,
                self.probe,
                stopwatch,
            )
            graph = self._live.required() if self.target == "effective" else None
            plan = make_plan(self.criterion, self.allocation, target, context, store, graph)
        rewind = self.rewind if self._rewinds_each_event else None
        self._carry_out(trainer, pl_module, position, event, target, plan, rewind, stopwatch.seconds)

    def _check_snapshot(self, event: float) -> None:
        if self.rewind is not None and self._snapshot is None:
            raise ValueError(
                f"the first pruning event, {self.schedule.unit} {event}, comes before the rewind point, "
                f"{self.rewind.unit} {self.rewind.at}; set `rewind.at` to an earlier place."
            )

    def _carry_out(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        position: Position,
        event: float,
        target: float,
        plan: Plan | None,
        rewind: Rewind | None,
        seconds: dict[str, float],
    ) -> None:
        """Commit a plan, rewind where asked to, and record the event."""
        store = self._held
        before, layers_before = store.sparsity, store.layer_sparsity()
        rewound = False
        if plan is not None:
            if rewind is not None and self._snapshot is not None:
                self._snapshot.check(pl_module, len(trainer.optimizers))
            if trainer.fast_dev_run:  # type: ignore[attr-defined]
                rank_zero_info(
                    f"fast_dev_run: {self.schedule.unit} {event:g} would prune to {target:.4f}; nothing is changed."
                )
                return
            plan.commit(pl_module, store)
            rewound = rewind is not None and store.sparsity > before and not _is_over(trainer, position)
            if rewound and rewind is not None and self._snapshot is not None:
                self._snapshot.restore(rewind, pl_module, store.masks, trainer.optimizers, _schedulers(trainer))
            self._hold_everywhere(trainer, pl_module)
        after, layers_after = store.sparsity, store.layer_sparsity()
        layers = {name: (layers_before[name], layers_after[name]) for name in layers_after}
        unit, step, epoch = self.schedule.unit, position.step, position.epoch
        self._events.append(
            PruningEvent(event, unit, step, epoch, target, before, after, layers, rewound, dict(seconds))
        )
        change = f"sparsity {before:.4f} to {after:.4f}" if after > before else f"sparsity stays at {after:.4f}"
        parts = ", ".join(f"{part} {value:.2f} s" for part, value in seconds.items())
        rank_zero_info(
            f"Pruning at {unit} {event:g} (step {step}): {change}{', weights rewound' if rewound else ''}"
            f"{f' ({parts})' if parts else ''}."
        )

    def _save_tickets(self, trainer: L.Trainer, pl_module: L.LightningModule, snapshot: Snapshot) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # asks all ranks
        if not trainer.is_global_zero:
            return
        trained = {name: tensor for name, tensor in pl_module.state_dict().items() if name in snapshot.tensors}
        kinds: tuple[tuple[Literal["ticket", "trained"], dict[str, Tensor]], ...] = (
            ("ticket", snapshot.tensors),
            ("trained", trained),
        )
        for kind, weights in kinds:
            path = save_ticket(unused_path(folder, kind), self._held, weights, kind, self._provenance())
            self.ticket_files[kind] = str(path)
            rank_zero_info(f"Saved {kind}: {path}")

    def _provenance(self) -> dict[str, Any]:
        return {
            "pruner": type(self).__name__,
            "criterion": repr(self.criterion),
            "schedule": repr(self.schedule),
            "allocation": repr(self.allocation),
            "rewind": repr(self.rewind),
            "seed": self._seed,
            "last_event": self._last_event,
            "unit": self.schedule.unit,
        }


def _check_l1(l1: float) -> float:
    meaning = "the coefficient of the L1 warm-up"
    value = check_number("l1", l1, meaning, ">= 0")
    if value < 0.0:
        raise ValueError(f"`l1` is {meaning} and must be >= 0; got {l1!r}.")
    return value


@torch.no_grad()
def _add_l1_(store: MaskStore, optimizer: torch.optim.Optimizer, l1: float) -> None:
    moved = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for entry in store.selected:
        if id(entry.parameter) in moved and entry.parameter.grad is not None:
            entry.parameter.grad.add_(entry.parameter.sign(), alpha=l1)


def _schedulers(trainer: L.Trainer) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _is_over(trainer: L.Trainer, position: Position) -> bool:
    by_steps = 0 < trainer.max_steps <= position.step
    by_epochs = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= position.epoch
    return by_steps or by_epochs
