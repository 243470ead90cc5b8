"""Seconds spent in the parts of a pruning event."""

import contextlib
import time
from collections.abc import Iterator

import torch


class Stopwatch:
    """Adds up the seconds of named parts; what passes in an inner part does not count for the outer one.

    >>> watch = Stopwatch()
    >>> with watch("scores"):
    ...     with watch("statistics"):
    ...         pass
    >>> sorted(watch.seconds)
    ['scores', 'statistics']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextlib.contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count what is done within for `part`."""
        before, self._inner = self._inner, 0.0
        start = _now()
        try:
            yield
        finally:
            passed = _now() - start
            self.seconds[part] = self.seconds.get(part, 0.0) + passed - self._inner
            self._inner = before + passed


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # or the work of one part would count for the next
    return time.perf_counter()
