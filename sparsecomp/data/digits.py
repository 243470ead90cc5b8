"""Real pictures of digits, without a download."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from sparsecomp._checks import check_int
from sparsecomp.data.in_memory import InMemoryDataModule, Part

_TRAINING = 1200
_SPLIT_SEED = 0


class DigitsDataModule(InMemoryDataModule):
    """The 1,797 handwritten digits of 8 x 8 pixels that scikit-learn ships.

    x: (batch, 1, 8, 8) float32 in [0, 1]; y: (batch,) int64 in 0 ... 9. The split is the same for every seed: 597
    pictures for testing, of the other 1,200 the last `validation` for validation and the rest for training.

    Args:
        batch_size: Pictures in a training batch, >= 1.
        validation: Pictures for validation, in [0, 1199]; 0 trains on all 1,200 and validates on none.
        seed: Start of the training order, a new one in each epoch; the run's seed if None.

    Raises:
        ValueError: If a number is out of its range.
        TypeError: If a number is no integer.

    Reference:
        E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.

    >>> data = DigitsDataModule()
    >>> data.setup("fit")
    >>> x, y = next(iter(data.train_dataloader()))
    >>> x.shape, y.dtype, len(data.train_dataloader())
    (torch.Size([64, 1, 8, 8]), torch.int64, 16)
    """

    def __init__(self, batch_size: int = 64, validation: int = 200, seed: int | None = None) -> None:
        super().__init__(batch_size, seed)
        self.validation = check_int("validation", validation, "the number of pictures for validation")
        if validation >= _TRAINING:
            raise ValueError(
                f"`validation` is the number of pictures for validation and must be in [0, {_TRAINING - 1}]; got {validation}."
            )

    def _parts(self) -> dict[Part, tuple[Tensor, Tensor]]:
        digits = load_digits()
        x = torch.from_numpy(digits.images).float().div_(16).unsqueeze(1)
        y = torch.from_numpy(digits.target).long()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(_SPLIT_SEED))
        x, y = x[order], y[order]
        first = _TRAINING - self.validation
        parts: dict[Part, slice] = {
            "train": slice(0, first),
            "val": slice(first, _TRAINING),
            "test": slice(_TRAINING, None),
        }
        return {name: (x[part], y[part]) for name, part in parts.items()}
