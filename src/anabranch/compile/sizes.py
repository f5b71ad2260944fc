"""The sizes that steps are padded to: few enough to be captured, close enough that padding costs little."""

from __future__ import annotations

from collections.abc import Callable


def decode_sizes(largest: int) -> list[int]:
    """Ascending, up to `largest`, which is one of them. Gaps grow with size: from 64 on, padding is under an eighth."""
    sizes = [1, 2, 4]
    step = 8
    while sizes[-1] < largest:
        if sizes[-1] >= 16 * step:
            step *= 2
        sizes.append((sizes[-1] // step + 1) * step)
    return [size for size in sizes if size < largest] + [largest]


def prefill_sizes(largest: int) -> list[int]:
    """Ascending, up to `largest`, which is one of them; four to a doubling, since a few rows more cost next to nothing
    while a step is bound by reading weights."""
    sizes = [16, 32, 48, 64]
    while sizes[-1] < largest:
        sizes += [sizes[-1] * quarter // 4 for quarter in (5, 6, 7, 8)]
    return [size for size in sizes if size < largest] + [largest]


def common_decode(sizes: list[int]) -> list[int]:
    """Those worth having before the first request: every doubling, and from where rows cost something on every half."""
    return _spaced(sizes, lambda size: 2 * size if size < 128 else 3 * size // 2)


def common_prefill(sizes: list[int]) -> list[int]:
    """Every doubling while weights are what a step reads; from where more rows take longer on, two to each."""
    return _spaced(sizes, lambda size: 2 * size if size < 512 else 4 * size // 3)


def _spaced(sizes: list[int], next_wanted: Callable[[int], int]) -> list[int]:
    """Largest first, so that the smaller ones fit into memory that the first has taken."""
    chosen = {sizes[-1]}
    wanted = 1
    for size in sizes:
        if size >= wanted:
            chosen.add(size)
            wanted = next_wanted(size)
    return sorted(chosen, reverse=True)


def fitting(sizes: list[int], num_rows: int) -> int | None:
    """The smallest that holds so many rows."""
    return next((size for size in sizes if size >= num_rows), None)
