"""Captured work by kind and padded size, made when nobody waits; and the plainest such work, one graph."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from anabranch.compile import sizes
from anabranch.platforms import Graph, Platform

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=str)
Made = TypeVar("Made")
Output = TypeVar("Output")

WORTH_IT, WORTH_WAITING = 8, 128
"""How often a size is missed before it is made, and before somebody has to wait for it: a tenth of a second for a large
model on an H200."""
STAND_IN = 2
"""How many times as large it may be."""
CLOSE = 16
"""Of a size's rows one in so many may be padding, where rows cost what they cost."""


class BySize(Generic[Kind, Made]):
    def __init__(self, all_sizes: list[int], make: Callable[[Kind, int], Made], padded: int | None = None) -> None:
        """Sizes above `padded` serve only what all but fills them."""
        self.sizes = all_sizes
        self.padded = all_sizes[-1] if padded is None else padded
        self.make = make
        self.made: dict[tuple[Kind, int], Made] = {}
        self.missed: Counter[tuple[Kind, int]] = Counter()

    def find(self, kind: Kind, num_rows: int) -> Made | None:
        """For so many rows. None: there is none that is not much too large. Nothing is made here: requests wait."""
        size = sizes.fitting(self.sizes, num_rows)
        if size is None or (size > self.padded and num_rows < size - size // CLOSE):
            return None
        found = self.made.get((kind, size))
        if found is not None:
            return found
        self.missed[kind, size] += 1
        most = min(self.padded, STAND_IN * size)
        larger = [other for of, other in self.made if of == kind and size < other <= most]
        return self.made[kind, min(larger)] if larger else None

    def make_missed(self, waiting: bool = False) -> bool:
        """One that was missed often, in a moment when nothing is to be done, or (`waiting`) something is but it was
        missed very often. False: there is none."""
        if not self.missed:
            return False
        (kind, size), times = self.missed.most_common(1)[0]
        if times < (WORTH_WAITING if waiting else WORTH_IT):
            return False
        self.add(kind, size)
        return True

    def add(self, kind: Kind, size: int) -> Made:
        found = self.made[kind, size] = self.make(kind, size)
        self.missed.pop((kind, size), None)
        log.debug("captured: %s, %d rows", kind, size)
        return found


def capture(platform: Platform, work: Callable[[], None], pool: Any) -> Graph:
    """`work` as a graph, on a platform that has them."""
    graph = platform.capture(work, pool)
    assert graph is not None, f"platform {platform.name} says that it captures graphs, and does not"
    return graph


class Captured(Generic[Output]):
    """One graph. It replays the same work on the same buffers: what it reads is put into `input` before, and what it
    computed stands in `output` until the next replay of any graph of the pool."""

    def __init__(
        self, platform: Platform, pool: Any, input: torch.Tensor, body: Callable[[torch.Tensor], Output]
    ) -> None:
        """`input`, on the device, is padding alone. The body is run before it is captured, for kernels are compiled and
        libraries take their workspace when first used; with padding it must change nothing that others read."""
        self.input = input
        self.output = body(input)

        def work() -> None:
            self.output = body(input)

        self.graph = capture(platform, work, pool)

    def replay(self, input: torch.Tensor) -> Output:
        """`input` lies in (pinned) host memory; nothing waits for the device."""
        self.input.copy_(input, non_blocking=True)
        self.graph.replay()
        return self.output
