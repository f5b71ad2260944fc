"""Times tiles of the experts' kernels on the current device and saves the table.

T tokens, D hidden width, I expert width, K experts per token, E experts.

Kernels are compiled first, on all cores, each once however many candidates use it. A candidate whose kernels were not
compiled in time is skipped, never compiled inline. Then every candidate is timed as the engine runs it: a graph of
calls over the weights of several layers, each call with its own tokens and routing.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from anabranch.formats import named
from anabranch.kernels.compiling.precompile import Job, precompile, recording
from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.tuning import experts_tables
from anabranch.kernels.tuning.experts_candidates import searches_of
from anabranch.kernels.tuning.experts_tables import CODEC, good_for
from anabranch.kernels.tuning.experts_tiles import Machine, Shape, Tiles, label
from anabranch.kernels.tuning.search import FAST_SECONDS, Progress, buckets, measure
from anabranch.kernels.tuning.table import Table, keep, save
from anabranch.kernels.tuning.timing import microseconds
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.weight import Weight
from anabranch.platforms import Platform

__all__ = ["SETS", "ExpertsBench", "Shape", "Tuned", "ensure", "label", "ship"]

log = logging.getLogger(__name__)

Weights = tuple[Weight, Weight]
"""gate_up_EFD and down_EDI of one layer."""
SETS = 4
"""Layers whose weights are used in rotation: together they are larger than any cache."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""‖y − y of the rule's tiles‖ / ‖y‖ that still counts as the same result."""
FP8_TOLERANCE = 0.1
"""The same where some tiles quantise activations and others do not."""


class ExpertsBench:
    """A Bench on a GPU."""

    def __init__(self, shape: Shape, weights: Sequence[Weights], activation: str, platform: Platform) -> None:
        self.shape = shape
        self.weights = weights
        self.activation = activation
        self.platform = platform
        self.size = 0
        self.calls: list[ExpertsCall] = []
        self.expected: torch.Tensor | None = None

    def calls_of(self, tokens: int) -> list[ExpertsCall]:
        """Made once per number of tokens; those of the previous number are dropped."""
        if tokens != self.size:
            self.size, self.expected = tokens, None
            count = 4 * len(self.weights) if tokens <= 64 else len(self.weights)
            self.calls = [self.draw(tokens, self.weights[i % len(self.weights)]) for i in range(count)]
        return self.calls

    def draw(self, tokens: int, weights: Weights) -> ExpertsCall:
        shape, device = self.shape, self.platform.device
        x_TD = torch.randn(tokens, shape.D, device=device).to(shape.dtype)
        score_TK, expert_TK = torch.rand(tokens, shape.num_experts, device=device).topk(shape.top_k)
        weight_TK = score_TK / score_TK.sum(-1, keepdim=True)
        return ExpertsCall(x_TD, weight_TK, expert_TK.int(), *weights, self.activation)

    def machine(self) -> Machine:
        """What calls of this shape can use of the machine."""
        return kernel.machine_for(self.calls_of(1)[0])

    def jobs_of(self, tokens: int, tiles: Tiles) -> list[Job]:
        """Kernels that these tiles use and that this process has not loaded."""
        with recording() as jobs:
            kernel.run(self.calls_of(tokens)[0], tiles)
        return jobs

    def compile(self, wanted: Sequence[tuple[int, Tiles]], seconds: float) -> None:
        jobs: dict[str, Job] = {}
        began = time.monotonic()
        with torch.inference_mode():
            for tokens, tiles in wanted:
                try:
                    jobs |= {job.hash(): job for job in self.jobs_of(tokens, tiles)}
                except Exception as error:
                    log.info("%s cannot be launched: %s", tiles, error)
        failed = precompile(list(jobs.values()), deadline=None if seconds == float("inf") else max(0.1, seconds))
        log.info("%d kernels, %d not compiled, after %.1f s", len(jobs), len(failed), time.monotonic() - began)

    @torch.inference_mode()
    def time(self, size: int, choice: Tiles) -> float | None:
        try:
            if not all(job.is_cached() for job in self.jobs_of(size, choice)):
                return None
            calls = self.calls_of(size)
            if not self.agrees(kernel.run(calls[0], choice)):
                log.warning("%d tokens: wrong result with %s", size, choice)
                return None
            return microseconds(self.platform, [partial(kernel.run, call, choice) for call in calls], repeats=5)
        except Exception as error:  # for example too much shared memory
            log.info("%d tokens: %s does not run: %s", size, choice, error)
            return None

    def agrees(self, y_TD: torch.Tensor) -> bool:
        """Whether it equals the first result for these tokens, which is that of the rule's tiles."""
        if self.expected is None:
            self.expected = y_TD
        distance = (y_TD.float() - self.expected.float()).norm() / self.expected.float().norm()
        return distance.item() <= (FP8_TOLERANCE if named(self.shape.format).is_block_fp8 else TOLERANCE[y_TD.dtype])


@dataclass(frozen=True, slots=True)
class Tuned:
    """What `ensure` did."""

    table: Table[Tiles] | None
    seconds: float
    measured: tuple[int, ...]
    """Sizes; () if a table had them all."""


def ensure(
    shape: Shape,
    weights: Sequence[Weights],
    activation: str,
    platform: Platform,
    level: str,
    most_tokens: int,
    progress: Progress | None = None,
    sizes: Sequence[int] = (),
    again: bool = False,
) -> Tuned:
    """Find the table for the shape on this device, measure the sizes it lacks, save it and use it from now on.

    `sizes` replaces the default ones. `again` measures even what a table has.
    """
    began = time.monotonic()
    device = platform.device
    table = None if again else experts_tables.table_for(device, shape)
    if table is not None and level == "full" and table.level != "full":
        table = None
    wanted = tuple(sizes) or (table.wanted if table is not None else buckets(level, most_tokens))
    left = [size for size in wanted if table is None or size not in table.times]
    if not left:
        return Tuned(table, time.monotonic() - began, ())
    bench, full = ExpertsBench(shape, weights[:SETS], activation, platform), level == "full"
    candidates = searches_of(left, shape, bench.machine(), full)
    found = Table(measure(bench, candidates, float("inf") if full else FAST_SECONDS, progress), level, tuple(left))
    del bench
    torch.cuda.empty_cache()  # free memory determines how many KV pages there will be
    seconds = time.monotonic() - began
    if not found.times:
        log.warning("no tiles could be measured in %.1f s: the built-in tiles are used", seconds)
        return Tuned(table, seconds, ())
    if table is not None:
        found = Table({**table.times, **found.times}, table.level, tuple(sorted({*table.wanted, *wanted})))
    found.about = {"device": platform.describe(), "seconds": round(seconds, 1), "missing": found.missing}
    experts_tables.install(device, shape, found)
    kernel.chosen.cache_clear()
    path = keep(found, CODEC, good_for(shape, device), experts_tables.made_with())
    log.info("tiles of %d token counts measured in %.1f s; saved in %s", len(found.times), seconds, path)
    return Tuned(found, seconds, tuple(size for size in left if size in found.times))


def ship(path: Path, shape: Shape, device: torch.device, table: Table[Tiles]) -> None:
    """Write the table as those in `tables/`, where its name is table.file_name(good_for(shape, device))."""
    if not save(path, table, CODEC, good_for(shape, device), {"version": experts_tables.TILES_VERSION}):
        raise OSError(f"{path} cannot be written")
