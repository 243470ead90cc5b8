"""What to keep: the interface of every criterion."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from sparsecomp._stopwatch import Stopwatch
from sparsecomp.gradients import batch_gradients, squared_sample_gradients
from sparsecomp.probe import Probe
from sparsecomp.selection import PrunableParameter
from sparsecomp.statistics import LayerStatistics, collect


class Need(Enum):
    """What a criterion looks at beside weights and masks."""

    GRADIENTS = "gradients"
    INPUT_MOMENTS = "input moments"
    ACTIVATIONS = "activations"

    @property
    def loss(self) -> bool:
        """Whether data alone is not enough and a loss is needed too."""
        return self is Need.GRADIENTS


@dataclass(frozen=True)
class ScoreContext:
    """The network as a criterion sees it at one pruning event.

    Attributes:
        module: The network, not to be changed.
        weights: Name to the selected weights, detached, pruned ones zero.
        masks: Name to the masks so far, bool, True = kept.
        seed: A number of this run and event, the same on every rank and after a resume.
        data: Batches, where the criterion's needs ask for them.
        loss: Scalar loss of (module, batch), where the needs ask for it.
        selected: Where each of the weights lives.
        probe: What the input and the output of the network are, and how many batches are looked at.
        stopwatch: Where the seconds that statistics and gradients take are counted.
    """

    module: nn.Module
    weights: Mapping[str, Tensor]
    masks: Mapping[str, Tensor]
    seed: int = 0
    data: Iterable[Any] | None = field(default=None, repr=False)
    loss: Callable[[nn.Module, Any], Tensor] | None = field(default=None, repr=False)
    selected: Sequence[PrunableParameter] = ()
    probe: Probe = field(default_factory=Probe, repr=False)
    stopwatch: Stopwatch = field(default_factory=Stopwatch, repr=False)
    _held: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def statistics(self, *, gradients: bool = False, signatures: bool = False) -> dict[str, LayerStatistics]:
        """Input moments of the selected layers over `data`, with credits and signatures where asked for; see `collect`.

        They are taken once an event, unless more is asked for than the time before.
        """
        held = self._held
        if not held or (gradients, signatures) > (held["gradients"], held["signatures"]):
            asked = {"gradients": gradients, "signatures": signatures}
            data = self.data if self.data is not None else ()
            with self.stopwatch("statistics"):
                found = collect(self.module, self.selected, data, self.probe, generator=self.generator(), **asked)
            held.update(asked, statistics=found)
        statistics: dict[str, LayerStatistics] = held["statistics"]
        return statistics

    def batch_gradients(self) -> dict[str, Tensor]:
        """The mean over batches of |gradient of the loss|, by name; see `gradients.batch_gradients`."""
        with self.stopwatch("statistics"):
            return batch_gradients(self.module, self.selected, *self._batches_and_loss())

    def squared_sample_gradients(self) -> dict[str, Tensor]:
        """The mean over samples of squared gradients, by name; see `gradients.squared_sample_gradients`."""
        with self.stopwatch("statistics"):
            return squared_sample_gradients(self.module, self.selected, *self._batches_and_loss())

    def _batches_and_loss(self) -> tuple[Iterable[Any], Probe, Callable[[nn.Module, Any], Tensor]]:
        if self.data is None or self.loss is None:
            raise RuntimeError("`check_needs` was not asked.")
        return self.data, self.probe, self.loss

    def generator(self) -> torch.Generator:
        """A fresh CPU generator for this event; the global random state is left alone."""
        return torch.Generator().manual_seed(self.seed)


class Criterion(ABC):
    """Scores each weight: the larger, the more it should be kept.

    A subclass is one file: it gives `needs` and `score`, and `refit` where kept weights, biases or norm statistics
    are adapted to what was removed. It keeps no state from event to event and changes nothing itself.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """What is looked at beside weights and masks; by default nothing."""
        return frozenset()

    @abstractmethod
    def score(self, context: ScoreContext) -> dict[str, Tensor]:
        """Return finite scores of the same names and shapes as `context.weights`."""

    def refit(self, context: ScoreContext, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return new values of parameters or buffers under the new masks, by qualified name; by default none."""
        return {}

    def check_needs(self, context: ScoreContext) -> None:
        """Refuse a context that lacks what this criterion looks at."""
        name = type(self).__name__
        wants = " and ".join(sorted(need.value for need in self.needs))
        if self.needs and context.data is None:
            raise ValueError(
                f"`data` yields the batches that {name} takes {wants} from, and none was given; pass `data`."
            )
        if any(need.loss for need in self.needs) and context.loss is None:
            raise ValueError(
                f"`loss` is the scalar that {name} takes {wants} of, and none was given; pass `loss`, a function of "
                "(module, batch)."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
