"""What the data modules of this package share: three sets of tensors, the training one shuffled."""

from abc import ABC, abstractmethod
from typing import Literal

import lightning as L
import torch
from torch import Tensor

from sparsecomp._checks import check_int
from sparsecomp.data.batches import TensorBatches

Part = Literal["train", "val", "test"]


class InMemoryDataModule(L.LightningDataModule, ABC):
    """Training batches in an order of (seed, epoch); validation and test sets as one batch each.

    A subclass gives `_parts`. A set that is empty has no loader.

    Args:
        batch_size: Samples in a training batch, >= 1.
        seed: Start of the training order, a new one in each epoch; the run's seed if None.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If a number is no integer.
    """

    def __init__(self, batch_size: int, seed: int | None) -> None:
        super().__init__()
        self.batch_size = check_int("batch_size", batch_size, "the number of samples in a batch", minimum=1)
        self.seed = seed if seed is None else check_int("seed", seed, "the start of the training order")
        self._batches: dict[str, TensorBatches] = {}

    @abstractmethod
    def _parts(self) -> dict[Part, tuple[Tensor, Tensor]]:
        """Return x and y of each set."""

    def setup(self, stage: str) -> None:
        """Read or draw the samples, once."""
        if self._batches:
            return
        seed = torch.initial_seed() if self.seed is None else self.seed
        for name, (x, y) in self._parts().items():
            if len(x) > 0:
                train = name == "train"
                size = self.batch_size if train else len(x)
                self._batches[name] = TensorBatches(x, y, batch_size=size, shuffle=train, seed=seed)

    def train_dataloader(self) -> TensorBatches:
        """Shuffled batches of training samples."""
        return self._batches["train"]

    def val_dataloader(self) -> TensorBatches | list[TensorBatches]:
        """All validation samples as one batch."""
        return self._batches.get("val", [])

    def test_dataloader(self) -> TensorBatches:
        """All test samples as one batch."""
        return self._batches["test"]
