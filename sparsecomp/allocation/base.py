"""Scores and a sparsity in, masks out: the interface of every allocation."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sparsecomp._checks import check_choice, check_int, check_sparsity

Granularity = Literal["weight", "unit"]
GRANULARITIES = ("weight", "unit")

logger = logging.getLogger(__name__)


@dataclass
class Items:
    """What is kept or dropped as one thing in one parameter: its weights, or its output units.

    Attributes:
        scores: (n,) larger = keep.
        alive: (n,) bool, False where an earlier event pruned.
        size: Weights in an item.
        shape: Shape of the parameter.
        unit_dim: Its dimension of output units.
    """

    scores: Tensor
    alive: Tensor
    size: int
    shape: tuple[int, ...]
    unit_dim: int

    @property
    def units(self) -> int:
        """Output units of the parameter."""
        return self.shape[self.unit_dim]

    @property
    def count(self) -> int:
        """Number of items, alive or not."""
        return self.scores.numel()

    @property
    def dropped(self) -> int:
        """Number of items already pruned."""
        return self.count - int(self.alive.count_nonzero())


class Allocation(ABC):
    """Turns scores into masks at a total sparsity. A pure function of its arguments.

    The number of weights dropped is exact, round(sparsity * N) over all N scores, by stable order: the smallest scores
    go, among equal ones those at earlier positions. With units, whole output rows or channels go, ranked by the mean
    of their weights' scores, and the number of weights dropped is the nearest that whole units reach. What an earlier
    mask dropped stays dropped, so that masks of a rising sparsity are nested.

    Args:
        granularity: "weight", or "unit" for output rows and channels.
        min_keep: Weights (or units) that every parameter keeps, >= 0; one by default, where a subclass does not say
            otherwise. Where it acts, other parameters lose more instead, and a warning says where; if even that does
            not reach the sparsity, the warning says so.

    A subclass gives `name` and `_allocate`.
    """

    name: str

    def __init__(self, granularity: Granularity = "weight", min_keep: int | None = None) -> None:
        self.granularity = check_choice("granularity", granularity, "what is kept or dropped as one", GRANULARITIES)
        if min_keep is not None:
            check_int("min_keep", min_keep, "the number of weights or units every parameter keeps")
        self.min_keep = min_keep

    def __call__(
        self,
        scores: Mapping[str, Tensor],
        sparsity: float,
        masks: Mapping[str, Tensor] | None = None,
        unit_dims: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """Return a mask for each score tensor.

        Args:
            scores: Parameter name to finite scores of the parameter's shape; larger = keep.
            sparsity: Total fraction of weights to drop, in [0, 1).
            masks: The masks so far; what they drop stays dropped.
            unit_dims: Parameter name to the dimension of its output units, 0 where not given.

        Raises:
            ValueError: If `scores` is empty or not finite (the message names the parameter), or `sparsity` is outside
                [0, 1).
        """
        check_sparsity("sparsity", sparsity)
        check_scores(scores)
        masks = masks or {}
        dims = {name: (unit_dims or {}).get(name, 0) for name in scores}
        items = {name: self._items(score, masks.get(name), dims[name]) for name, score in scores.items()}
        total = sum(item.count * item.size for item in items.values())
        dropped = sum(item.dropped * item.size for item in items.values())
        target = math.floor(sparsity * total + 0.5)
        if target <= dropped:
            kept = {name: item.alive.clone() for name, item in items.items()}
        else:
            kept = self._allocate(items, target, sparsity)
        return {name: self._expand(kept[name], scores[name], dims[name]) for name in scores}

    @abstractmethod
    def _allocate(self, items: Mapping[str, Items], target: int, sparsity: float) -> dict[str, Tensor]:
        """Return which items are kept, so that `target` weights in all are dropped."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(granularity={self.granularity!r}, min_keep={self.min_keep})"

    def _floor(self, item: Items, sparsity: float) -> int:
        """Items that a parameter keeps in any case."""
        if self.min_keep is not None:
            return min(self.min_keep, item.count)
        return self._default_floor(item, sparsity)

    def _default_floor(self, item: Items, sparsity: float) -> int:
        return 1

    def _items(self, score: Tensor, mask: Tensor | None, dim: int) -> Items:
        if mask is None:
            mask = torch.ones_like(score, dtype=torch.bool)
        if self.granularity == "weight":
            return Items(score.flatten(), mask.flatten(), 1, tuple(score.shape), dim)
        by_unit = score.movedim(dim, 0).flatten(1) if score.dim() > 1 else score.reshape(-1, 1)
        alive = mask.movedim(dim, 0).reshape(by_unit.shape).any(1)
        return Items(by_unit.double().mean(1), alive, by_unit.shape[1], tuple(score.shape), dim)

    def _expand(self, kept: Tensor, score: Tensor, dim: int) -> Tensor:
        if self.granularity == "weight":
            return kept.reshape(score.shape)
        shape = [1] * score.dim()
        shape[dim] = -1
        return kept.reshape(shape).expand(score.shape).clone()


def check_scores(scores: Mapping[str, Tensor]) -> None:
    """Refuse an empty mapping, and NaN or infinite scores with the parameter's name."""
    if not scores:
        raise ValueError("`scores` maps parameter names to tensors and must not be empty.")
    for name, score in scores.items():
        # A sum is one fast pass; only where it is not finite (also from an overflow) is every score looked at.
        if not bool(score.sum().isfinite()) and not bool(score.isfinite().all()):
            nan = int(score.isnan().sum())
            raise ValueError(
                f"the scores of {name!r} must be finite; got {nan} NaN and {int(score.isinf().sum())} infinite of "
                f"{score.numel()}. Nothing was pruned; look at the weights and gradients of that layer."
            )


def warn_guarded(guarded: Mapping[str, int], reached: bool) -> None:
    """Say which parameters `min_keep` kept from losing more, and how many items each keeps."""
    if guarded:
        logger.warning(
            "min_keep acted: %s%s.",
            ", ".join(f"{name} keeps {count}" for name, count in sorted(guarded.items())),
            "; other layers lose more instead" if reached else ", and the sparsity stays below what was asked for",
        )


def resolve_allocation(value: Any) -> Allocation:
    """Return an allocation from an instance or a name such as "global"."""
    from sparsecomp._discovery import concrete_subclasses

    if isinstance(value, Allocation):
        return value
    by_name = {class_.name: class_ for class_ in concrete_subclasses(Allocation)}  # type: ignore[type-abstract]
    if value in by_name:
        return by_name[value]()
    raise ValueError(
        f"`allocation` turns scores into masks and must be an Allocation or one of "
        f"{', '.join(repr(name) for name in by_name)}; got {value!r}."
    )
