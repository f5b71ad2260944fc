"""Measuring how long device work takes: by the host's clock, over many replays of a captured graph where possible.

No device events: there are enough replays between two readings of the clock that the host's overhead does not matter.
"""

import statistics
import time
from collections.abc import Callable, Sequence

from anabranch.platforms import Platform


def microseconds(
    platform: Platform,
    calls: Sequence[Callable[[], object]],
    *,
    repeats: int = 7,
    least_seconds: float = 0.003,
    graph: bool = True,
) -> float:
    """Median µs of one call. Calls are made in rotation, so that their inputs are not in a cache.

    `least_seconds` is the shortest duration of one repeat. Without `graph`, calls are launched one by one from Python.
    """

    def all_calls() -> None:
        for call in calls:
            call()

    all_calls()  # includes compilation and setup
    platform.synchronize()
    captured = platform.capture(all_calls) if graph else None
    once = all_calls if captured is None else captured.replay
    seconds = _seconds(platform, once, 1)
    count = max(1, int(least_seconds / max(seconds, 1e-9)))
    times = [_seconds(platform, once, count) for _ in range(repeats)]
    return 1e6 * statistics.median(times) / (count * len(calls))


def _seconds(platform: Platform, once: Callable[[], None], count: int) -> float:
    platform.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        once()
    platform.synchronize()
    return time.perf_counter() - begin
