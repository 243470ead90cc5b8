"""Batches of tensors in memory: no per-sample collation, a fixed order per seed and epoch, and a place to resume at."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsecomp._checks import check_int


class TensorBatches:
    """Yields tuples of slices of tensors, as a data loader that Lightning takes.

    The order of epoch e is a function of (seed, e) alone. `state_dict` has the place within the epoch, so that a
    training resumed in the middle of an epoch sees the remaining batches and no other. Under DDP each rank takes every
    world-size-th sample of the same order, the last ones repeated from the start where they do not divide.

    Args:
        tensors: Tensors of equal length.
        batch_size: Samples in a batch, >= 1; the last batch may be smaller.
        shuffle: A new order in each epoch; else that of the tensors.
        seed: Start of the orders.

    Raises:
        ValueError: If the tensors are empty or of different lengths, or a number is out of its range.
        TypeError: If a number is no integer.

    >>> batches = TensorBatches(torch.arange(5), batch_size=2)
    >>> [batch.tolist() for (batch,) in batches], len(batches)
    ([[0, 1], [2, 3], [4]], 3)
    """

    # Lightning asks every loader that has a sampler for this one too.
    batch_sampler: None = None

    def __init__(self, *tensors: Tensor, batch_size: int, shuffle: bool = False, seed: int = 0) -> None:
        lengths = {len(tensor) for tensor in tensors}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"`tensors` must be non-empty and of equal length; got lengths {sorted(lengths)}.")
        self.tensors = tensors
        self.batch_size = check_int("batch_size", batch_size, "the number of samples in a batch", minimum=1)
        self.shuffle = shuffle
        self.seed = check_int("seed", seed, "the start of the orders")
        self._epoch = 0
        self._done = 0
        self._resume: tuple[int, int] | None = None

    @property
    def sampler(self) -> "TensorBatches":
        """Itself: Lightning tells the epoch to a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration has."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches in an epoch of this rank."""
        samples = math.ceil(len(self.tensors[0]) / _ranks()[1])
        return math.ceil(samples / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        first, self._done = 0, 0
        if self._resume is not None:
            epoch, done = self._resume
            self._resume = None
            if epoch == self._epoch and done < len(self):
                first = done
        order = self._order()
        for index in range(first, len(self)):
            chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
            self._done = index + 1
            yield tuple(tensor[chosen] for tensor in self.tensors)

    def state_dict(self) -> dict[str, Any]:
        """The seed, the epoch, and how many of its batches were handed out."""
        return {"seed": self.seed, "epoch": self._epoch, "done": self._done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with that seed; the next iteration of that epoch begins after the batches that were handed out."""
        self.seed = state_dict["seed"]
        self._resume = (state_dict["epoch"], state_dict["done"])

    def _order(self) -> Tensor:
        samples = len(self.tensors[0])
        if self.shuffle:
            # One stream of orders per seed; epochs are far apart in it, so that seeds do not share orders.
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self._epoch) % 2**63)
            order = torch.randperm(samples, generator=generator)
        else:
            order = torch.arange(samples)
        rank, ranks = _ranks()
        share = math.ceil(samples / ranks)
        padded = order.repeat(math.ceil(share * ranks / samples))
        return padded[rank : share * ranks : ranks]


def _ranks() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
