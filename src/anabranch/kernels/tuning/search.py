"""Measuring choices within a time budget: which sizes, which choices, in which order.

Knows neither the op nor the device: a `Bench` compiles and times what this file asks for.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
C = TypeVar("C", contravariant=True)
Progress = Callable[[int, int], None]
"""Called with (measurements done, total)."""

FAST_SECONDS = 14.5
"""Budget at a start, which may take 15 seconds for it: setup and the last measurement are not included."""
COMPILING = 0.75
"""Share of the budget after which nothing more is compiled, so that time remains to measure."""
MOST = 16384
"""The largest size to measure; larger ones use its result."""
HOPELESS = 1.25
"""A choice slower than the best of its size by this factor is not refined."""


class Bench(Protocol[C]):
    """Compiles and times choices on a device."""

    def compile(self, wanted: Sequence[tuple[int, C]], seconds: float) -> None:
        """Compile for (size, choice) pairs, for at most `seconds`."""

    def time(self, size: int, choice: C) -> float | None:
        """µs; None if it was not compiled, does not run or gives a wrong result. Never raises for those."""


@dataclass(frozen=True, slots=True)
class Search(Generic[T]):
    """A choice and the changes to try on it, one stage after another: first those of one product, then of the other.

    With one stage per product, g + d measurements find what g · d would, provided that the products are independent,
    and every kernel is compiled once.
    """

    base: T
    stages: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Fields of the choice to replace."""

    def near(self) -> list[T]:
        """The base and every single change of it: together they use all kernels that the search can need."""
        return [self.base, *(replace(self.base, **c) for stage in self.stages for c in stage)]  # type: ignore[type-var]


def measure(
    bench: Bench[T],
    searches: Mapping[int, Sequence[Search[T]]],
    seconds: float = float("inf"),
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, dict[T, float]]:
    """Times of choices for each size, in the order of `searches`; stops after `seconds` and keeps what it has."""
    begin = clock()
    near = dict.fromkeys((size, choice) for size, some in searches.items() for one in some for choice in one.near())
    bench.compile(list(near), COMPILING * seconds)
    found: dict[int, dict[T, float]] = {}
    total, done = len(near), 0

    def timed(size: int, choice: T) -> bool:
        """Whether the choice has a time now."""
        nonlocal done
        times = found.setdefault(size, {})
        if choice not in times and clock() - begin < seconds:
            us = bench.time(size, choice)
            if us is not None:
                times[choice] = us
            done += 1
            if progress is not None:
                progress(min(done, total), total)
        return choice in times

    for size, some in searches.items():
        for search in some:
            best = search.base
            for stage in search.stages if timed(size, best) else ():
                times = found[size]
                if times[best] > HOPELESS * min(times.values()):
                    break
                changed = [replace(best, **change) for change in stage]  # type: ignore[type-var]
                best = min([best, *(choice for choice in changed if timed(size, choice))], key=times.__getitem__)
    if progress is not None:
        progress(total, total)
    return {size: times for size, times in found.items() if times}


def buckets(level: str, most: int) -> tuple[int, ...]:
    """Sizes to measure for batches of up to `most` tokens, the most important first."""
    sizes = [1, 64, 16, 4096, 256, 8, 1024, MOST] if level == "fast" else [1 << i for i in range(MOST.bit_length())]
    most = min(most, MOST)
    kept = [size for size in sizes if size <= most]
    return tuple(kept if most < 2 * max(kept) else [*kept, most])
