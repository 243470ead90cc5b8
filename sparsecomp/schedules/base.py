"""When to prune and how much: the interface of every schedule."""

import bisect
import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from sparsecomp._checks import check_choice, check_int, check_number

Unit = Literal["step", "epoch", "fraction"]
UNITS = ("step", "epoch", "fraction")

# Positions given as fractions are sums and quotients of floats: .2 + .2 + .2 must be the same place as .6.
_DIGITS = 12


class Schedule(ABC):
    """When pruning events happen and what total sparsity each one reaches.

    A position counts what is complete: optimizer steps (`unit="step"`), epochs (`"epoch"`) or the share of the
    training that is over, in [0, 1] (`"fraction"`). Position 0 is before the first update. Sparsity is always the
    TOTAL fraction of weights removed so far, in [0, 1), so that asking twice at the same position changes nothing.
    The lottery-ticket rule, a share of what remains, has a name of its own: `Geometric`.

    A subclass is a frozen dataclass with a field `unit`; it gives `positions`, `final_sparsity` and
    `_sparsity_of(index)`, the sparsity of the event at `positions[index]`.
    """

    unit: Unit

    if TYPE_CHECKING:  # at run time a property would become the default of the subclasses' dataclass field

        @property
        def final_sparsity(self) -> float:
            """Total sparsity after the last event."""

    @abstractmethod
    def _positions(self) -> Sequence[float]:
        """Positions of the events, ascending; rounding errors of fractions are taken off."""

    @abstractmethod
    def _sparsity_of(self, index: int) -> float:
        """Total sparsity that the event at `positions[index]` reaches."""

    @cached_property
    def positions(self) -> tuple[float, ...]:
        """Positions of all events, ascending, in `unit`."""
        return tuple(check_position("position", position, self.unit) for position in self._positions())

    @property
    def is_monotone(self) -> bool:
        """Whether sparsity never falls from one event to the next."""
        values = [self._sparsity_of(index) for index in range(len(self.positions))]
        return all(a <= b for a, b in itertools.pairwise(values))

    def last_event(self, position: float) -> float | None:
        """Position of the latest event at or before `position`, or None if there was none yet."""
        index = self._index(position)
        return None if index is None else self.positions[index]

    def is_event(self, position: float) -> bool:
        """Whether an event happens exactly at `position`."""
        return self.last_event(position) == self._clean(position)

    def sparsity(self, position: float) -> float:
        """Total sparsity in force at `position`: that of the latest event, 0 before the first one."""
        index = self._index(position)
        return 0.0 if index is None else self._sparsity_of(index)

    def with_final_sparsity(self, final_sparsity: float) -> Self:
        """A copy of this schedule that ends at `final_sparsity`."""
        return dataclasses.replace(self, final_sparsity=final_sparsity)  # type: ignore[type-var]

    def _index(self, position: float) -> int | None:
        index = bisect.bisect_right(self.positions, self._clean(position)) - 1
        return None if index < 0 else index

    def _clean(self, position: float) -> float:
        return check_position("position", position, self.unit)


def check_position(name: str, value: Any, unit: str) -> float:
    """Return a valid position: an integer >= 0, or a float in [0, 1] when `unit` is "fraction"."""
    if unit == "fraction":
        meaning = "a share of the training"
        number = round(check_number(name, value, meaning, "in [0, 1]"), _DIGITS)
        if not 0.0 <= number <= 1.0:
            raise ValueError(
                f"`{name}` is {meaning} and must be in [0, 1]; got {value!r}. For epochs use unit='epoch'."
            )
        return number
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_int(name, value, f"a number of completed {unit}s")


def check_unit(unit: Any) -> None:
    """Refuse any unit but step, epoch and fraction."""
    check_choice("unit", unit, "what positions are counted in", UNITS)


def check_every(every: Any, unit: str) -> None:
    """Refuse a distance between events that is not positive or not in the unit's form."""
    if unit != "fraction":
        every = int(every) if isinstance(every, float) and every.is_integer() else every
        check_int("every", every, f"the number of {unit}s from one event to the next", minimum=1)
        return
    number = check_number("every", every, "the share of the training from one event to the next", "in (0, 1]")
    if not 0.0 < number <= 1.0:
        raise ValueError(
            f"`every` is the share of the training from one event to the next and must be in (0, 1]; got {every!r}."
        )
