"""A group of ranks and its collectives: a contract, with torch.distributed behind it.

Layers are handed a group and call it whether there are several ranks or one: with one, every method returns its input.
Every rank of a group must make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import os
import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from anabranch.parallel import collective_ops
from anabranch.platforms import OneShot, Platform

# torch 2.13 has other names for these two and warns of the old ones, of which torch 2.11 has no others.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

STEP_SECONDS = 300.0
"""For a collective: longer than any step."""
ONE_SHOT_BYTES = 512 << 10
"""Up to which one kernel that reads from all ranks takes less time than the passes of a library."""
BUFFER_VARIABLE = "ANABRANCH_COLLECTIVE_BUFFER"


class Group(Protocol):
    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on every rank: the same bits on each. May be x itself, overwritten."""

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """The ranks' tensors of one shape, one after the other along `dim`."""

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's share, along dim 0, of the sum over all ranks."""

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Rows for each rank, `send` of them, exchanged for those that the ranks have for this one."""

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        """That rank's x, written into x."""

    def reserve(self, platform: Platform, num_bytes: int) -> None:
        """Before steps are captured: make the buffers that their collectives use. `num_bytes`: of the largest tensor
        that a captured step sums over the ranks. ValueError if a buffer of the given size is too small for it."""

    def barrier(self, seconds: float) -> None:
        """Wait for all ranks; RuntimeError if one has not come after that time."""


class OneRank:
    """A group of one: every collective returns its input."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        return x

    def reserve(self, platform: Platform, num_bytes: int) -> None:
        pass

    def barrier(self, seconds: float) -> None:
        pass


ALONE = OneRank()


LEAST_BUSY = 0.05
"""Of a second, what a process that computes gets of a CPU at least, however many others there are."""


class Presence:
    """Whether this process is inside a collective, and since when: for another thread, which tells others."""

    def __init__(self) -> None:
        self.first_stretch: dict[int, float] = {}
        """By size of a step (a power of two of its rows), the seconds before its first collective, the last time."""
        self.begin()

    def begin(self, num_rows: int = 0) -> None:
        """New work begins, of which collectives are a part. `num_rows`: of a step in which others may have fewer."""
        self.size, self.first, self.cpu_then = num_rows.bit_length(), True, time.process_time()
        self.now = False, time.monotonic()
        """(inside, since)"""
        self.longest = self.first_stretch.get(self.size, 0.0)
        """Seconds of the longest computation between two collectives of this work."""

    def __enter__(self) -> None:
        now = time.monotonic()
        self.longest = max(self.longest, now - self.now[1])
        if self.first and self.size:
            self.first_stretch[self.size] = now - self.now[1]
        self.now, self.first = (True, now), False

    def __exit__(self, *_: object) -> None:
        self.now = False, time.monotonic()

    def is_first(self, seconds: float) -> bool:
        """Whether it has computed for these seconds, on a CPU, before the first collective of a step of a new size:
        nothing tells how long that takes."""
        busy = time.process_time() - self.cpu_then > LEAST_BUSY * seconds
        return self.first and self.size > 0 and self.size not in self.first_stretch and busy


PRESENCE = Presence()


def _moved(x: torch.Tensor) -> torch.Tensor:
    """The same memory, as what gloo takes where it only moves it: FP8 as bytes."""
    return x.view(torch.uint8) if x.is_floating_point() and x.element_size() == 1 else x


class TorchGroup:
    """A process group of torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.name: str = group.group_name
        self.one_shot: OneShot | None = None
        collective_ops.GROUPS[self.name] = self

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return collective_ops.all_reduce(x, self.name)  # type: ignore[no-any-return]
        x = x.contiguous()
        if self.one_shot is not None and self.one_shot.takes(x):
            return self.one_shot.all_reduce(x)
        with PRESENCE:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return collective_ops.all_gather(x, dim, self.name)  # type: ignore[no-any-return]
        rows = x.movedim(dim, 0).contiguous()
        out = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        with PRESENCE:
            _gather(_moved(out), _moved(rows), group=self.group)
        return out.movedim(0, dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return collective_ops.reduce_scatter(x, self.name)  # type: ignore[no-any-return]
        if x.shape[0] % self.size:
            raise ValueError(f"{x.shape[0]} rows cannot be divided among {self.size} ranks")
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        with PRESENCE:
            _scatter(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        with PRESENCE:
            dist.all_to_all_single(_moved(out), _moved(x.contiguous()), receive, send, group=self.group)
        return out

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        with PRESENCE:
            dist.broadcast(_moved(x), group=self.group, group_src=source)
        return x

    def reserve(self, platform: Platform, num_bytes: int) -> None:
        needed = min(num_bytes, ONE_SHOT_BYTES)
        given = os.environ.get(BUFFER_VARIABLE, "")
        if given and (not given.isdecimal() or 0 < int(given) < needed):
            raise ValueError(
                f"{BUFFER_VARIABLE}={given}: the buffer of collectives must have at least {needed:,} bytes, because "
                f"tensors of up to {num_bytes:,} bytes are summed in captured steps and those of up to "
                f"{ONE_SHOT_BYTES:,} go through it; leave it unset, or set it to 0 for no buffer"
            )
        self.one_shot = platform.make_one_shot(self.group, int(given) if given else needed)

    def barrier(self, seconds: float) -> None:
        try:
            done = dist.barrier(group=self.group, async_op=True)
            assert done is not None
            done.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} has waited {seconds:g} s for the other {self.size - 1}: has one ended? ({error})"
            ) from None


def on_host(group: Group, every: int = 1) -> Group:
    """The same ranks, or every so many of them, for tensors in host memory. A rank that is not among them is alone."""
    if not isinstance(group, TorchGroup) or (every == 1 and dist.get_backend(group.group) == "gloo"):
        return group
    made = dist.new_group(list(range(0, group.size, every)), backend="gloo", timeout=timedelta(seconds=STEP_SECONDS))
    return ALONE if group.rank % every else TorchGroup(made)


def split(group: Group, size: int) -> Group:
    """The ranks of a group in groups of `size`, one after another; returns this rank's. All ranks call this."""
    if size == 1:
        return ALONE
    timeout = timedelta(seconds=STEP_SECONDS)
    firsts = range(0, group.size, size)
    made = [dist.new_group(list(range(first, first + size)), timeout=timeout) for first in firsts]
    return TorchGroup(made[group.rank // size])


def abort() -> None:
    """End the collectives of this process that wait for a rank that is gone. Those of gloo end by themselves, when
    connections are closed; a device would wait for ever. Their results are no numbers."""
    if dist.is_initialized() and dist.get_backend() != "gloo":
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()
