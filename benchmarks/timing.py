"""Interleaved timing: one round calls every contestant once, so that a busy neighbour slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping


def medians(contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 3) -> dict[str, float]:
    """Median seconds of each contestant over `rounds` rounds, after `warmup` more that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for index in range(rounds + warmup):
        # The one that comes first changes, so that none always finds the caches of the same other.
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.perf_counter()
            contestants[name]()
            if index >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}
