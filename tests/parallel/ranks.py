"""Functions run by several ranks: processes on this machine that exchange tensors by gloo."""

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from anabranch import platforms
from anabranch.platforms.fake import FakePlatform

IMPORTED = ("anabranch.ranks.runner", "anabranch.engine.single", "tests.models.tiny", "tests.formats.writers")
"""What ranks need and takes 8 s of a processor to import, in each rank of each test."""


def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What `function(group, *args)` returns on each rank. If one fails, the others are ended, and its error raised."""
    with tempfile.TemporaryDirectory() as folder:
        _import_once()
        mp.start_processes(_rank, (num_ranks, folder, function, args), num_ranks, start_method="forkserver")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(num_ranks)]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks that engines of this process start are forks as well: started at once, and otherwise the same. So are
    those that ranks start."""
    monkeypatch.setattr("anabranch.ranks.runner.spawn", _spawn)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakePlatform:
    """The platform that captures, in this process and in those of its ranks."""
    platform = FakePlatform()
    monkeypatch.setenv("ANABRANCH_PLATFORM", "fake")
    monkeypatch.setattr(platforms, "current", lambda: platform)
    return platform


def _spawn(target: Callable[..., None], arguments: tuple[Any, ...], name: str, environment: dict[str, str]) -> Any:
    _import_once()
    args = target, arguments, dict(os.environ) | environment
    process = multiprocessing.get_context("forkserver").Process(target=_fork, args=args, name=name, daemon=True)
    process.start()
    return process


def _fork(target: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]) -> None:
    from anabranch.ranks import runner

    os.environ.clear()
    os.environ.update(environment)
    # The process that this one is a fork of makes those of this one too, and is not its to start.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    runner.spawn = _spawn
    target(*arguments)


@functools.cache
def _import_once() -> None:
    """Start the process that ranks are forks of."""
    if multiprocessing.parent_process() is not None:
        return
    multiprocessing.set_forkserver_preload(list(IMPORTED))
    with pytest.MonkeyPatch.context() as environment:
        # multiprocessing tells it our path, and it takes no notice.
        environment.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        forkserver.ensure_running()


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
