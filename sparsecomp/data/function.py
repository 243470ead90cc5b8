"""Samples of a target function."""

import torch
from torch import Tensor

from sparsecomp._checks import check_instance, check_int
from sparsecomp.data.in_memory import InMemoryDataModule, Part
from sparsecomp.functions import TargetFunction
from sparsecomp.functions.base import generators

_SAMPLE_SEED = 0


class FunctionDataModule(InMemoryDataModule):
    """Inputs drawn from the distribution of a target function, and its outputs there.

    x: (batch, in_features) float32; y: (batch, out_features) float32, of unit variance. The samples are the same for
    every seed, which orders them only, and the three sets are drawn apart: the size of one changes no other.

    Args:
        function: What is to be learned; it is in `function` again, with its graph.
        training: Number of training samples, >= 1.
        validation: Number of validation samples, >= 0; with 0 there is no validation.
        test: Number of test samples, >= 1.
        batch_size: Samples in a training batch, >= 1.
        seed: Start of the training order, a new one in each epoch; the run's seed if None.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If a number is no integer, or `function` no TargetFunction.

    >>> from sparsecomp.functions import Tree
    >>> data = FunctionDataModule(Tree())
    >>> data.setup("fit")
    >>> x, y = next(iter(data.train_dataloader()))
    >>> x.shape, y.shape, len(data.train_dataloader())
    (torch.Size([128, 8]), torch.Size([128, 1]), 94)
    """

    def __init__(
        self,
        function: TargetFunction,
        training: int = 12000,
        validation: int = 1024,
        test: int = 2048,
        batch_size: int = 128,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed)
        self.function = check_instance("function", function, "what is to be learned", TargetFunction, "Tree()")
        self.training = check_int("training", training, "the number of training samples", minimum=1)
        self.validation = check_int("validation", validation, "the number of validation samples")
        self.test = check_int("test", test, "the number of test samples", minimum=1)

    def _parts(self) -> dict[Part, tuple[Tensor, Tensor]]:
        sizes: dict[Part, int] = {"train": self.training, "val": self.validation, "test": self.test}
        drawn = {}
        for (name, size), generator in zip(sizes.items(), generators(_SAMPLE_SEED, len(sizes)), strict=True):
            x = self.function.sample_inputs(size, generator) if size > 0 else torch.empty(0)
            drawn[name] = (x, self.function(x) if size > 0 else x)
        return drawn
