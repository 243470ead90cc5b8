"""Schedules: when to prune and how much. Each file of this folder is one schedule."""

from typing import Any

from sparsecomp._discovery import export_family
from sparsecomp.schedules.base import Schedule as Schedule

MEMBERS = export_family(__name__, Schedule)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no schedule {name!r}; there are {', '.join(MEMBERS)}.")
