"""Functions run by several ranks: processes on this machine that exchange tensors by gloo."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(group, *args)` returns on each rank. If one fails, the others are ended, and its error raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (num_ranks, folder, function, args), nprocs=num_ranks)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    from anabranch.parallel.group import TorchGroup

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    assert dist.group.WORLD is not None
    torch.save(function(TorchGroup(dist.group.WORLD), *args), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
