"""Criteria: what to keep. Each file of this folder is one criterion."""

from typing import Any

from sparsecomp._discovery import export_family
from sparsecomp.criteria.base import Criterion as Criterion
from sparsecomp.criteria.base import Need as Need
from sparsecomp.criteria.base import ScoreContext as ScoreContext

MEMBERS = export_family(__name__, Criterion)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no criterion {name!r}; there are {', '.join(MEMBERS)}.")
