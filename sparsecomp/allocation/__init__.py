"""Allocations: scores and a sparsity in, masks out. Each file of this folder is one allocation."""

from typing import Any

from sparsecomp._discovery import export_family
from sparsecomp.allocation.base import Allocation as Allocation
from sparsecomp.allocation.base import resolve_allocation as resolve_allocation

MEMBERS = export_family(__name__, Allocation)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no allocation {name!r}; there are {', '.join(MEMBERS)}.")
