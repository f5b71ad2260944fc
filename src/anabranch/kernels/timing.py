"""How long device work takes: calls in turn, as one captured graph where the platform captures, by the host's clock.

No device events: enough replays lie between two looks at the clock that what the host adds does not matter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.platforms import Platform


def microseconds(
    platform: Platform,
    calls: Sequence[Callable[[], object]],
    *,
    repeats: int = 7,
    least_seconds: float = 0.003,
    graph: bool = True,
) -> float:
    """Median µs of one call, the calls being made in turn, so that what they read is not in a cache.

    Without `graph` they are made one by one from Python. `least_seconds`: of one of the repeats.
    """

    def all_calls() -> None:
        for call in calls:
            call()

    all_calls()  # whatever is compiled or set up at first
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
