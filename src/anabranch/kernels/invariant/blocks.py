"""Numbers of rows with which a product is called, such that each row's bits are the same in all of them.

Libraries choose code and its order of sums by the shape of a product, and do so differently on every CPU. So this asks
the machine: a product of random rows is computed with each number of rows and with one and all threads, and those that
agree with PIVOT rows in every bit are used. What is used may thus not be the same on two machines.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from anabranch.platforms.cpu import threads

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 256)
PIVOT = 16
"""The fallback too: a few rows cost little more than one where weights come from memory."""
THREADS = torch.get_num_threads()
"""As many as the process has when kernels are bound; steps take these or one."""


def agreeing(same: Callable[[int], bool], sizes: Sequence[int], pivot: int) -> tuple[int, ...]:
    """Those sizes that give the same bits, on one thread and on all; (): not even the pivot does."""
    agreed = set(sizes)
    for number in {1, THREADS}:
        with threads(number):
            agreed = {size for size in agreed if same(size)}
    return tuple(sorted(agreed)) if pivot in agreed else ()


@functools.cache
def cover(rows: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """(first row, rows, size) of blocks; one may have fewer rows than its size."""
    found, begin = [], 0
    while left := rows - begin:
        above = min((size for size in sizes if size >= left), default=0)
        below = max((size for size in sizes if size <= left), default=0)
        size = above if above and (not below or above <= 1.5 * left) else below
        found.append((begin, min(left, size), size))
        begin += found[-1][1]
    return tuple(found)
