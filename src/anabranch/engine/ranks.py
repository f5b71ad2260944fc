"""An engine whose model is divided among ranks, each a process with a share of the weights and of every page.

Rank 0, the driver, is the engine's own process: scheduler, sampler, page accounting. The others follow: they get an
Order for every step, the plain ints of its rows and the page-table entries that have changed, launch the same work,
take part in its collectives, and receive the tokens that the driver has sampled. So nothing is decided twice.

Orders travel through a pipe to each follower; collectives are torch.distributed's. A follower ends with its driver,
because the pipe ends then. A follower that has ended is named in the error of the next step.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from anabranch import platforms
from anabranch.engine.batch import Order
from anabranch.engine.torch_runner import TorchRunner
from anabranch.parallel.group import Group, TorchGroup

if TYPE_CHECKING:
    from anabranch.config import EngineConfig
    from anabranch.engine.runner import Launched, Pages, Progress, StateCopy
    from anabranch.engine.scheduler import Share
    from anabranch.platforms import Platform

log = logging.getLogger(__name__)

START_SECONDS = 600.0
"""For all ranks to load their weights."""
STEP_SECONDS = 300.0
"""For a collective: longer than any step."""
END_SECONDS = 5.0
"""For a follower to end by itself."""


@dataclass(slots=True)
class Follower:
    rank: int
    process: multiprocessing.process.BaseProcess
    pipe: Connection


class RanksRunner(TorchRunner):
    """The driver's runner: TorchRunner on rank 0, which tells the others."""

    def __init__(self, config: EngineConfig, platform: Platform, progress: Progress | None) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="anabranch-ranks-")
        self.followers: list[Follower] = []
        size = config.tensor_parallel_size
        try:
            store = Path(self.folder.name, "store")
            for rank in range(1, size):
                self.followers.append(start(rank, config, platform, store))
            with self._watched("the start"):
                super().__init__(config, platform, progress, join(0, size, platform, store))
                self._replies()
        except BaseException:
            self.close()
            raise

    def num_pages(self) -> list[int]:
        with self._watched("num_pages"):
            self._tell("num_pages")
            found = [super().num_pages(), *self._replies()]
        return [min(group) for group in zip(*found, strict=True)]

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        with self._watched("allocate"):
            self._tell("allocate", num_pages, max_model_len)
            super().allocate(num_pages, max_model_len)
            self.steps.log = []
            self._replies()

    def warm_up(self) -> None:
        with self._watched("warm_up"):
            self._tell("warm_up")
            super().warm_up()
            self._replies()

    def idle(self, waiting: bool = False) -> None:
        """Captures contain collectives: all ranks capture at the same time."""
        if any(captured is not None and captured.missed for captured in (self.decodes, self.prompts, self.prefills)):
            with self._watched("idle"):
                self._tell("idle", waiting)
                super().idle(waiting)

    def copy_states(self, copies: list[StateCopy]) -> None:
        with self._watched("a copy of states"):
            self._tell("copy_states", copies)
            super().copy_states(copies)

    def launch(self, shares: list[Share], pages: Pages) -> Launched:
        with self._watched("a step"):
            return super().launch(shares, pages)

    def announce(self, order: Order) -> None:
        assert self.steps.log is not None
        tables = [(begin, [host[begin:end] for host in self.steps.host_tables]) for begin, end in self.steps.log]
        self.steps.log.clear()
        self._tell("follow", order._replace(tables=tables))

    def close(self) -> None:
        for follower in self.followers:
            with contextlib.suppress(OSError):
                follower.pipe.close()
        deadline = time.monotonic() + END_SECONDS
        for follower in self.followers:
            follower.process.join(max(0.0, deadline - time.monotonic()))
            if follower.process.is_alive():
                follower.process.kill()
                follower.process.join()
        self.followers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        self.folder.cleanup()

    def _tell(self, name: str, *args: Any) -> None:
        message = pickle.dumps((name, args), protocol=5)
        for follower in self.followers:
            follower.pipe.send_bytes(message)

    def _replies(self) -> list[Any]:
        """What each follower answers; an error of one is raised here."""
        found = []
        for follower in self.followers:
            if not follower.pipe.poll(START_SECONDS):
                raise RuntimeError(f"rank {follower.rank} has not answered for {START_SECONDS:g} s")
            good, reply = pickle.loads(follower.pipe.recv_bytes())
            if not good:
                raise ValueError(f"rank {follower.rank}: {reply}")
            found.append(reply)
        return found

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Names the follower that has ended, where something fails because of that."""
        try:
            yield
        except (OSError, EOFError, RuntimeError) as error:
            deadline = time.monotonic() + 1.0  # a process that was killed may not be dead yet
            while time.monotonic() < deadline:
                for follower in self.followers:
                    if follower.process.exitcode is not None:
                        how = described(follower.process.exitcode)
                        raise RuntimeError(f"rank {follower.rank} of the model {how} during {what}") from error
                time.sleep(0.02)
            raise


def described(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"


def start(rank: int, config: EngineConfig, platform: Platform, store: Path) -> Follower:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow, args=(rank, config, store, theirs), name=f"rank {rank}", daemon=True)
    before = {name: os.environ.get(name) for name in platform.rank_environment(rank)}
    os.environ.update(platform.rank_environment(rank))
    try:
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    theirs.close()
    return Follower(rank, process, ours)


def join(rank: int, size: int, platform: Platform, store: Path) -> Group:
    """The group of all ranks."""
    if platform.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // size))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")  # all are on this machine
    timeout = timedelta(seconds=STEP_SECONDS)
    dist.init_process_group(
        platform.collective_backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout
    )
    assert dist.group.WORLD is not None
    return TorchGroup(dist.group.WORLD)


def follow(rank: int, config: EngineConfig, store: Path, pipe: Connection) -> None:
    """The life of a follower: load, then do what the driver says until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends the others

    def reply(work: Callable[[], Any]) -> bool:
        try:
            message = True, work()
        except Exception as error:
            message = False, str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(message, protocol=5))
        return message[0]

    runner: TorchRunner | None = None

    def load() -> None:
        nonlocal runner
        platform = platforms.current()
        runner = TorchRunner(config, platform, None, join(rank, config.tensor_parallel_size, platform, store))

    if not reply(load):
        return
    assert runner is not None
    with contextlib.suppress(EOFError, OSError):
        while True:
            name, args = pickle.loads(pipe.recv_bytes())
            if name in ("num_pages", "allocate", "warm_up"):
                reply(lambda name=name, args=args: getattr(runner, name)(*args))  # type: ignore[misc]
            else:
                getattr(runner, name)(*args)
    os._exit(0)  # not through torch.distributed's destructors, which wait for ranks that are gone
