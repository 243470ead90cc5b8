"""Argument checks with one form of error: name, meaning, allowed range, what came, what to do."""

import math
import numbers
from typing import Any


def check_sparsity(name: str, value: Any, meaning: str = "the fraction of weights removed") -> float:
    """Return `value` as a float in [0, 1).

    >>> check_sparsity("final_sparsity", 0.9)
    0.9
    >>> check_sparsity("final_sparsity", 90)
    Traceback (most recent call last):
    ValueError: `final_sparsity` is the fraction of weights removed and must be in [0, 1); got 90. For 90% write 0.9.
    """
    number = check_number(name, value, meaning, "in [0, 1)")
    if not 0.0 <= number < 1.0:
        hint = f" For {number:g}% write {number / 100:g}." if 1.0 < number < 100.0 else ""
        raise ValueError(f"`{name}` is {meaning} and must be in [0, 1); got {value!r}.{hint}")
    return number


def check_number(name: str, value: Any, meaning: str, range_: str = "a finite number") -> float:
    """Return `value` as a finite float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"`{name}` is {meaning} and must be {range_}; got {value!r} of type {type(value).__name__}.")
    if not math.isfinite(value):
        raise ValueError(f"`{name}` is {meaning} and must be {range_}; got {value!r}.")
    return float(value)


def check_int(name: str, value: Any, meaning: str, minimum: int = 0) -> int:
    """Return `value` as an int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(
            f"`{name}` is {meaning} and must be an integer >= {minimum}; got {value!r} of type {type(value).__name__}."
        )
    if value < minimum:
        raise ValueError(f"`{name}` is {meaning} and must be an integer >= {minimum}; got {value!r}.")
    return int(value)


def check_choice(name: str, value: Any, meaning: str, choices: tuple[str, ...]) -> str:
    """Return `value`, one of `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"`{name}` is {meaning} and must be one of {listed}; got {value!r}.")
    return str(value)


def check_instance(name: str, value: Any, meaning: str, class_: type, example: str) -> Any:
    """Return `value`, an instance of `class_`."""
    if not isinstance(value, class_):
        given = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}"
        raise TypeError(f"`{name}` is {meaning} and must be a {class_.__name__}, such as {example}; got {given}.")
    return value
