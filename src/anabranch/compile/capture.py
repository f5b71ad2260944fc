"""Captured steps by variant and padded size; missed sizes are captured later. And the simplest one, a single graph."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from anabranch.compile import sizes
from anabranch.platforms import Graph, Platform

log = logging.getLogger(__name__)

Variant = TypeVar("Variant", bound=str)
Made = TypeVar("Made")
Output = TypeVar("Output")

IDLE_MISSES, BUSY_MISSES = 8, 128
"""How often a size is missed before it is captured, while the engine is idle and while requests wait: it takes a tenth
of a second for a large model on an H200."""
MAX_SUBSTITUTE = 2
"""The largest captured size that may serve for a missing one, relative to it."""
MAX_PADDING = 16
"""One row in 16 may be padding in steps so large that the time grows with the rows."""


class BySize(Generic[Variant, Made]):
    def __init__(self, all_sizes: list[int], make: Callable[[Variant, int], Made], padded: int | None = None) -> None:
        """Sizes above `padded` serve only steps that almost fill them."""
        self.sizes = all_sizes
        self.padded = all_sizes[-1] if padded is None else padded
        self.make = make
        self.made: dict[tuple[Variant, int], Made] = {}
        self.missed: Counter[tuple[Variant, int]] = Counter()

    def find(self, variant: Variant, num_rows: int) -> Made | None:
        """The captured step for `num_rows` rows; None if there is none of about that size. Nothing is captured here:
        requests wait for this step."""
        size = sizes.fitting(self.sizes, num_rows)
        if size is None or (size > self.padded and num_rows < size - size // MAX_PADDING):
            return None
        found = self.made.get((variant, size))
        if found is not None:
            return found
        self.missed[variant, size] += 1
        most = min(self.padded, MAX_SUBSTITUTE * size)
        larger = [other for of, other in self.made if of == variant and size < other <= most]
        return self.made[variant, min(larger)] if larger else None

    def make_missed(self, waiting: bool = False) -> bool:
        """Capture a size that was missed often; if requests are `waiting`, only one that was missed very often. False
        if there is none."""
        if not self.missed:
            return False
        (variant, size), times = self.missed.most_common(1)[0]
        if times < (BUSY_MISSES if waiting else IDLE_MISSES):
            return False
        self.add(variant, size)
        return True

    def add(self, variant: Variant, size: int) -> Made:
        found = self.made[variant, size] = self.make(variant, size)
        self.missed.pop((variant, size), None)
        log.debug("captured: %s, %d rows", variant, size)
        return found


def capture(platform: Platform, pool: Any, works: Sequence[Callable[[], None]]) -> list[Graph]:
    """Each of `works` as a graph, on a platform that has them. All run once before that, because kernels are compiled
    and libraries take their workspace at first use."""
    for work in works:
        work()
    try:
        graphs = [graph for work in works if (graph := platform.capture(work, pool)) is not None]
    except RuntimeError as error:
        raise RuntimeError(
            f"the model's steps cannot be captured as graphs; graphs none does without: {error}"
        ) from error
    assert len(graphs) == len(works), f"platform {platform.name} has the capability graphs but captured none"
    return graphs


class Captured(Generic[Output]):
    """One graph. It replays the same work on the same buffers: it reads `input`, and what it computed stays in `output`
    until the next replay of any graph of the pool."""

    def __init__(
        self, platform: Platform, pool: Any, input: torch.Tensor, body: Callable[[torch.Tensor], Output]
    ) -> None:
        """`input`, on the device, is padding alone, on which the body must change nothing that is read later."""
        self.input = input
        self.output: Output

        def work() -> None:
            self.output = body(input)

        self.graphs = capture(platform, pool, [work])

    def replay(self, input: torch.Tensor) -> Output:
        """`input` lies in (pinned) host memory; nothing waits for the device."""
        self.input.copy_(input, non_blocking=True)
        self.graphs[0].replay()
        return self.output
