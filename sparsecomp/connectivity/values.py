"""What a value of a traced forward pass is, as far as units go."""

from dataclasses import dataclass

from torch import Tensor

GONE = 0


@dataclass(frozen=True)
class Units:
    """A tensor whose dimension `axis` counts the units of a space.

    Attributes:
        space: Number of the space.
        axis: Negative dimension; `GONE` if the one unit has no dimension any more.
        dims: Number of dimensions, None if not known.
    """

    space: int
    axis: int
    dims: int | None


@dataclass(frozen=True)
class Flattened:
    """Units of `space` flattened into the last dimension together with other dimensions of unknown size.

    Attributes:
        space: Number of the space before.
        channels_first: Whether a unit's features lie side by side; otherwise units repeat.
    """

    space: int
    channels_first: bool


@dataclass(frozen=True)
class Input:
    """Depends on the network's inputs and on nothing else: whatever its shape, all of it is input."""


@dataclass(frozen=True)
class Weight:
    """A parameter itself."""

    name: str
    tensor: Tensor


@dataclass(frozen=True)
class Constant:
    """Depends neither on inputs nor on weights: numbers, shapes, buffers."""


@dataclass(frozen=True)
class Several:
    """A tuple of values."""

    values: tuple["Value", ...]


Value = Units | Flattened | Input | Weight | Constant | Several
