"""What connects one set of units with the next: a weight, a link unit by unit, or a mixing of all."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightUse:
    """One use of a weight: source units -> target units.

    The weight is read as a matrix of `rows` = its first dimension and all else as columns. Of Linear and convolutions
    the rows are target units and the columns (source units of the row's group) x (taps); of transposed convolutions,
    embeddings and `x @ weight` the rows are source units.

    Attributes:
        name: Fully qualified name of the parameter.
        source: Number of the space it reads.
        target: Number of the space it writes.
        shape: Shape of the parameter.
        groups: Groups of a convolution.
        transposed: Whether the first dimension counts source units.
    """

    name: str
    source: int
    target: int
    shape: tuple[int, ...]
    groups: int = 1
    transposed: bool = False

    @property
    def taps(self) -> int:
        """Weights between one source and one target unit."""
        return int(torch.Size(self.shape[2:]).numel())

    @property
    def source_size(self) -> int:
        """Units read."""
        return self.shape[0] if self.transposed else self.shape[1] * self.groups

    @property
    def target_size(self) -> int:
        """Units written."""
        return self.shape[1] * self.groups if self.transposed else self.shape[0]

    def columns(self, units: Tensor) -> Tensor:
        """Values of the units on the column side -> (groups, columns)."""
        return units.reshape(self.groups, -1).repeat_interleave(self.taps, dim=1)

    def units(self, columns: Tensor) -> Tensor:
        """(groups, columns) -> the largest over the taps of each unit on the column side."""
        return columns.reshape(-1, self.taps).amax(1)


@dataclass(frozen=True)
class Link:
    """Source unit `source_units[k]` is target unit `target_units[k]`; no target unit occurs twice."""

    source: int
    target: int
    source_units: Tensor
    target_units: Tensor

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The larger of `target` and what arrives from `source`."""
        return target.index_copy(
            0, self.target_units, torch.maximum(target[self.target_units], source[self.source_units])
        )

    def backward(self, target: Tensor, source: Tensor) -> Tensor:
        """The larger of `source` and what arrives from `target`."""
        return source.scatter_reduce(0, self.source_units, target[self.target_units], "amax")


@dataclass(frozen=True)
class Mixing:
    """Every source unit of a group reaches every target unit of that group: norms over units, softmax, a mean."""

    source: int
    target: int
    groups: int = 1

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The larger of `target` and what arrives from `source`."""
        arriving = source.reshape(self.groups, -1).amax(1, keepdim=True)
        return torch.maximum(target, arriving.expand(-1, target.numel() // self.groups).reshape(-1))

    def backward(self, target: Tensor, source: Tensor) -> Tensor:
        """The larger of `source` and what arrives from `target`."""
        return self.forward(target, source)


Step = WeightUse | Link | Mixing
