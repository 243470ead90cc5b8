"""Target functions whose graph of constituents is known. A file of this folder with a target function is all it takes."""

from typing import Any

from sparsecomp._discovery import export_family
from sparsecomp.functions.base import TargetFunction as TargetFunction

MEMBERS = export_family(__name__, TargetFunction)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no target function {name!r}; there are {', '.join(MEMBERS)}.")
