"""The lottery-ticket rewind: a snapshot of the training state, and what a rewind restores of it."""

import copy
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sparsecomp._checks import check_choice, check_int
from sparsecomp._distributed import broadcast_from_rank_zero_
from sparsecomp.averaging import averaged_prefixes

logger = logging.getLogger(__name__)


class _Scheduler(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True)
class Rewind:
    """When the snapshot is taken and what each pruning event puts back.

    Kept weights are always put back, bit for bit; pruned ones stay zero. Not rewound: the order of the data, the
    random state, weight averages, and buffers that are no norm statistics.

    Args:
        at: Position of the snapshot in `unit`; 0 is the initialisation, before the first update.
        unit: "step" or "epoch".
        other_parameters: Put back the parameters that hold no mask: biases, norm scales, embeddings.
        norm_statistics: Put back the running mean and variance of BatchNorm and InstanceNorm layers.
        optimizer_state: Put back what the optimizers remember (at initialisation: nothing).
        lr_schedule: Put back the learning-rate schedulers, and the learning rates and other settings of the
            optimizers' parameter groups, so that each round runs through the schedule again.

    Raises:
        ValueError: If a value is out of its range.
        TypeError: If a value has the wrong type.

    Reference:
        J. Frankle, M. Carbin: The Lottery Ticket Hypothesis, arXiv 1803.03635 (at=0); J. Frankle et al.: Linear Mode
        Connectivity and the Lottery Ticket Hypothesis, arXiv 1912.05671 (at=k, late rewinding).

    >>> Rewind(at=500, unit="step").at
    500
    """

    at: int = 0
    unit: Literal["step", "epoch"] = "step"
    other_parameters: bool = True
    norm_statistics: bool = True
    optimizer_state: bool = True
    lr_schedule: bool = True

    def __post_init__(self) -> None:
        check_choice("unit", self.unit, "what `at` is counted in", ("step", "epoch"))
        check_int("at", self.at, f"the number of completed {self.unit}s at which the snapshot is taken")


@dataclass(frozen=True)
class Snapshot:
    """A training state, cloned: nothing in it shares memory with a live tensor.

    Attributes:
        tensors: Qualified name to parameter or norm statistic.
        optimizers: The optimizers' state dicts.
        schedulers: Class name and state dict of each learning-rate scheduler.
    """

    tensors: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    schedulers: list[tuple[str, dict[str, Any]]]

    @classmethod
    @torch.no_grad()
    def take(
        cls, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), schedulers: Iterable[_Scheduler] = ()
    ) -> "Snapshot":
        """Clone the state as it is now; parameters and norm statistics are rank 0's on every rank."""
        tensors = {name: tensor.detach().clone() for name, tensor in _parameters_and_statistics(module)}
        broadcast_from_rank_zero_(tensors.values())
        return cls(
            tensors=tensors,
            optimizers=[copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
            schedulers=[(type(s).__name__, copy.deepcopy(s.state_dict())) for s in schedulers],
        )

    @torch.no_grad()
    def restore(
        self,
        rewind: Rewind,
        module: nn.Module,
        masked: Iterable[str],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[_Scheduler] = (),
    ) -> None:
        """Put back what `rewind` asks for, into the same tensors. The caller applies the masks afterwards.

        Args:
            rewind: What to put back.
            module: The network the snapshot was taken of.
            masked: Names of the parameters that hold masks; these are always put back.
            optimizers: The optimizers, as many as in `take`.
            schedulers: The learning-rate schedulers; if their classes are others than in `take`, they are left alone and
                a warning says so.

        Raises:
            ValueError: If the network or the number of optimizers is not that of the snapshot. Nothing has changed.
        """
        live = self.check(module, len(optimizers))
        wanted = set(masked)
        if rewind.other_parameters:
            wanted |= {name for name, _ in module.named_parameters()}
        if rewind.norm_statistics:
            wanted |= {name for name, _ in _norm_statistics(module)}
        for name in wanted & self.tensors.keys():
            live[name].copy_(self.tensors[name])
        lr_schedule = rewind.lr_schedule
        if lr_schedule and [type(scheduler).__name__ for scheduler in schedulers] != [
            name for name, _ in self.schedulers
        ]:
            logger.warning(
                "The learning-rate schedulers are others than at the rewind point (%s); they and the learning rates are "
                "left as they are.",
                ", ".join(name for name, _ in self.schedulers) or "none",
            )
            lr_schedule = False
        for optimizer, saved in zip(optimizers, self.optimizers, strict=True):
            _restore_optimizer(optimizer, saved, rewind.optimizer_state, lr_schedule)
        if lr_schedule:
            for scheduler, (_, state) in zip(schedulers, self.schedulers, strict=True):
                scheduler.load_state_dict(copy.deepcopy(state))

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and tensors, which `torch.load(weights_only=True)` reads."""
        return {"tensors": self.tensors, "optimizers": self.optimizers, "schedulers": self.schedulers}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Snapshot":
        """The inverse of `state_dict`."""
        return cls(dict(state["tensors"]), list(state["optimizers"]), list(state["schedulers"]))

    def check(self, module: nn.Module, optimizers: int) -> dict[str, Tensor]:
        """Return the live tensors that a restore writes to.

        Raises:
            ValueError: If the network or the number of optimizers is not that of the snapshot.
        """
        live = dict(_parameters_and_statistics(module))
        for name, tensor in self.tensors.items():
            if name not in live or live[name].shape != tensor.shape:
                found = tuple(live[name].shape) if name in live else "missing"
                raise ValueError(
                    f"the rewind snapshot holds {name!r} with shape {tuple(tensor.shape)}, in the network it is {found}; "
                    "rewind only the network that the snapshot was taken of."
                )
        if optimizers != len(self.optimizers):
            raise ValueError(
                f"the rewind snapshot holds {len(self.optimizers)} optimizers; the training has {optimizers}."
            )
        return live


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], state: bool, settings: bool) -> None:
    if not (state or settings):
        return
    # load_state_dict may keep the tensors it is given; the snapshot must stay as it is.
    saved, current = copy.deepcopy(saved), optimizer.state_dict()
    optimizer.load_state_dict(
        {
            **current,
            "state": (saved if state else current)["state"],
            "param_groups": (saved if settings else current)["param_groups"],
        }
    )


def _parameters_and_statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    averages = averaged_prefixes(module)
    for name, tensor in itertools.chain(module.named_parameters(), _norm_statistics(module)):
        if not name.startswith(averages):
            yield name, tensor


def _norm_statistics(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, layer in module.named_modules():
        if isinstance(layer, _NormBase):
            yield from layer.named_buffers(prefix, recurse=False)
