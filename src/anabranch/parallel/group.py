"""A group of ranks and its collectives: a contract, with torch.distributed behind it.

Layers are handed a group and call it whether there are several ranks or one: with one, every method returns its input.
Every rank of a group must make the same calls in the same order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

# torch 2.13 has other names for these two and warns of the old ones, of which torch 2.11 has no others.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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

    def barrier(self, seconds: float) -> None:
        pass


ALONE = OneRank()


class TorchGroup:
    """A process group of torch.distributed: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        rows = x.movedim(dim, 0).contiguous()
        out = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        _gather(out, rows, group=self.group)
        return out.movedim(0, dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % self.size:
            raise ValueError(f"{x.shape[0]} rows cannot be divided among {self.size} ranks")
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        _scatter(out, x.contiguous(), group=self.group)
        return out

    def all_to_all(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=self.group)
        return out

    def broadcast(self, x: torch.Tensor, source: int = 0) -> torch.Tensor:
        dist.broadcast(x, group=self.group, group_src=source)
        return x

    def barrier(self, seconds: float) -> None:
        try:
            done = dist.barrier(group=self.group, async_op=True)
            assert done is not None
            done.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} has waited {seconds:g} s for the other {self.size - 1}: has one ended? ({error})"
            ) from None
