"""A metric of a network: the interface of all of them."""

import math
import re
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor
from torchmetrics import Metric

from sparsecomp.metrics.batch import NetworkBatch
from sparsecomp.metrics.functional.undefined import UndefinedError
from sparsecomp.metrics.network import Part


class NetworkMetric(Metric, ABC):
    """A number that describes a network, from sums over batches.

    A subclass declares its states with `add_sum`, adds to them in `_add` and makes the number of them in `_value`. Both
    raise UndefinedError where there is none: then `compute` returns NaN, and `reason` says why. States are sums, so that
    the order of batches does not matter, memory does not grow, and ranks add up.

    Attributes:
        needs: What of a NetworkBatch the metric looks at beside weights and masks.
        reason: Why the last `compute` returned NaN; empty if it did not.
    """

    needs: ClassVar[frozenset[Part]] = frozenset()
    full_state_update = False

    batches: Tensor
    undefined: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self._refusal = ""
        self.add_sum("batches")
        self.add_sum("undefined")

    @classmethod
    def label(cls) -> str:
        """The name it is logged under: `EffectiveFanIn` is "effective_fan_in"."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def add_sum(self, name: str) -> None:
        """Declare a state that adds over batches and ranks; it gets its shape from the first batch."""
        self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, batch: NetworkBatch) -> None:
        """Add a batch."""
        self.batches = self.batches + 1
        try:
            self._add(batch)
        except UndefinedError as error:
            self.undefined = self.undefined + 1
            self._refusal = str(error)

    def compute(self) -> Tensor:
        """The number, a scalar; NaN where there is none, see `reason`."""
        self.reason, value = "", math.nan
        if not self.batches:
            self.reason = "no batch was seen."
        elif self.undefined:
            self.reason = self._refusal or "a batch that was merged in could not be used."
        else:
            try:
                value = self._value()
            except UndefinedError as error:
                self.reason = str(error)
        return torch.tensor(value, device=self.device)

    @abstractmethod
    def _add(self, batch: NetworkBatch) -> None:
        """Add a batch to the states."""

    @abstractmethod
    def _value(self) -> float:
        """The number, from the states."""


def check_live(live: Tensor) -> Tensor:
    """Return which units are live, and refuse fewer than two of them."""
    count = int(live.sum())
    if count < 2:
        raise UndefinedError(f"there are {count} live hidden units, and fewer than 2 say nothing.")
    return live
