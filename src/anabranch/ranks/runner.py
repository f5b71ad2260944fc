"""An engine whose model is divided among ranks, each a process with a share of the weights and of every page.

Rank 0, the driver, is the engine's own process: scheduler, sampler, page accounting. The others follow: they get an
Order for every step, the plain ints of its rows and the page-table entries that have changed, launch the same work,
take part in its collectives, and receive the tokens that the driver has sampled. So nothing is decided twice.

Orders travel through a pipe to each follower; collectives are torch.distributed's. A follower ends with its driver,
because the pipe ends then; one that ends or hangs ends all (`watch`).
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store as TorchStore

from anabranch import platforms
from anabranch.engine.runner import DATA_PARALLEL
from anabranch.parallel.group import PRESENCE, STEP_SECONDS, Group, TorchGroup
from anabranch.ranks import nodes
from anabranch.ranks.rank_runner import Order, RankRunner
from anabranch.ranks.watch import END, NESTED_SETTLE_SECONDS, Follower, Pulse, Watch

if TYPE_CHECKING:
    from anabranch.config import EngineConfig
    from anabranch.engine.runner import Launched, Pages, Progress, StateCopy
    from anabranch.engine.scheduler import Share
    from anabranch.platforms import Fetch, Platform

Environment = dict[str, str]
"""Variables that give a process one of a machine's devices."""
Keys = tuple[str, str]
"""What ranks of one machine find each other by: a file, and what keys of their engine there begin with."""
START_SECONDS = 600.0
"""For all ranks to load their weights."""
ANSWERED = ("step", "stats")
"""Calls of a rank that has started whose result the driver waits for."""
END_SECONDS = 5.0
"""For a follower to end by itself."""
VERDICT_SECONDS = 1.5
"""For `watch` to find out which rank has made a collective fail."""
NESTED_VERDICT_SECONDS = 5.0
"""The same, where other ranks have followers of their own, and name them: on a busy machine each needs a second or
more."""


class RanksRunner(RankRunner):
    """The driver's runner: RankRunner on rank 0, which tells the others.

    Where ranks have requests of their own, the driver tells the first rank of each other engine, and that one those
    with the same tokens, with a runner such as this (see data_parallel).
    """

    def __init__(
        self,
        config: EngineConfig,
        platform: Platform,
        progress: Progress | None,
        rank: int = 0,
        store: Keys | TorchStore | None = None,
        environments: Sequence[Environment] = (),
    ) -> None:
        """Of rank 0; of another, with the store of all ranks and what gives their devices to those it starts."""
        self.followers: list[Follower] = []
        self.store = Store() if rank == 0 else None
        self.watch = Watch(self.followers, rank)
        self.num_steps = 0
        size, tensor, here = config.num_ranks, config.tensor_parallel_size, nodes.place(config)
        far: dict[int, tuple[Connection, Connection, Connection]] = {}
        try:
            if self.store is None:
                for other, environment in enumerate(environments, rank + 1):
                    self.followers.append(start(other, config, store if here is None else None, [environment]))
            else:
                store, near = self.store.keys, size // config.nodes
                ranks = [*range(1, tensor), *range(tensor, size, tensor)]
                for other in (other for other in ranks if other < near):
                    found = find_environments(other, config, platform)
                    self.followers.append(start(other, config, None if here else self.store.keys, found))
                if here is not None:
                    store = nodes.open_store(0, START_SECONDS)
                    far = nodes.Gate(here, store, START_SECONDS).admit(other for other in ranks if other >= near)
            self.followers += [Follower(other, None, *connections) for other, connections in far.items()]
            for pipe, *_ in far.values():
                pipe.send_bytes(pickle.dumps(config))
            self.same = [follower for follower in self.followers if follower.rank < rank + tensor]
            """Ranks that have the same tokens as this one."""
            self.others = self.followers[len(self.same) :]
            """The first ranks of other engines."""
            if self.others and self.same:
                self.watch.settle_seconds = NESTED_SETTLE_SECONDS
            self.watch.start()
            with self._watched("the start"):
                self._replies(self.followers)  # all have come: nobody waits for a rank that has failed before
                assert store is not None
                super().__init__(config, platform, progress, join(rank, size, platform, store))
                self._replies(self.followers)
        except BaseException:
            self.close()
            raise

    @property
    def failure(self) -> str:
        return self.watch.failure

    def num_pages(self) -> list[int]:
        with self._watched("num_pages"):
            self._tell(self.followers, "num_pages")
            found = [super().num_pages(), *self._replies(self.followers)]
        return [min(group) for group in zip(*found, strict=True)]

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        with self._watched("allocate"):
            self._tell(self.followers, "allocate", num_pages, max_model_len)
            super().allocate(num_pages, max_model_len)
            self.steps.log = [] if self.same else None
            self._replies(self.followers)

    def warm_up(self) -> None:
        with self._watched("warm_up"):
            self._tell(self.followers, "warm_up")
            super().warm_up()
            self._replies(self.followers)
        self.watch.warm = True

    def idle(self, waiting: bool = False) -> None:
        """Captures contain collectives: all ranks capture at the same time."""
        if any(captured.missed for captured in self.forward.captured):
            self.watch.warm = False
            with self._watched("idle"):
                self._tell(self.same, "idle", waiting)
                super().idle(waiting)
            self._carried_out()
            self.watch.warm = True

    def copy_states(self, copies: list[StateCopy]) -> None:
        with self._watched("a copy of states"):
            self._tell(self.same, "copy_states", copies)
            super().copy_states(copies)

    def settle_rows(self, tried: list[tuple[int, int, int, int]]) -> None:
        with self._watched("a change of states"):
            self._tell(self.same, "settle_rows", tried)
            super().settle_rows(tried)

    def launch(self, shares: list[Share], pages: Pages) -> Launched:
        self._begin_step()
        with self._watched("a step"):
            launched = super().launch(shares, pages)
        self._carried_out()
        for name in ("tokens", "drafts", "routed", "pooled"):
            if (fetch := getattr(launched, name)) is not None:
                setattr(launched, name, WatchedFetch(fetch, self._watched))
        return launched

    def _begin_step(self) -> None:
        self.turn()

    def turn(self) -> None:
        """Before ranks are told of a step: move experts, if it is time."""
        self.num_steps += 1
        if self.config.rebalance_interval and self.num_steps % self.config.rebalance_interval == 0:
            self.rebalance()

    def rebalance(self) -> None:
        with self._watched("moving experts"):
            self._tell(self.followers, "rebalance")
            super().rebalance()

    def join(self) -> None:
        with self._watched("a step"):
            super().join()

    def announce(self, order: Order) -> None:
        assert self.steps.log is not None
        tables = [(begin, [host[begin:end] for host in self.steps.host_tables]) for begin, end in self.steps.log]
        self.steps.log.clear()
        self._tell(self.same, "follow", order._replace(tables=tables))

    def close(self) -> None:
        self.watch.close()
        for follower in self.followers:
            with contextlib.suppress(OSError):
                follower.pipe.close()
        deadline = time.monotonic() + END_SECONDS
        for follower in self.followers:
            if follower.process is not None:
                follower.process.join(max(0.0, deadline - time.monotonic()))
                follower.end()
                follower.process.join()
            follower.beats.close()
            if follower.node is not None:
                follower.node.close()
        self.followers.clear()
        if dist.is_initialized():
            super().close()
            dist.destroy_process_group()
        if self.store is not None:
            self.store.close()

    def _tell(self, followers: list[Follower], name: str, *args: Any) -> None:
        PRESENCE.begin()
        self.watch.thread = threading.get_ident()
        message = pickle.dumps((name, args), protocol=5) if followers else b""
        for follower in followers:
            follower.num_told += 1
            follower.pipe.send_bytes(message)

    def _replies(self, followers: list[Follower]) -> list[Any]:
        """What each of these answers; an error of one is raised here."""
        found = []
        for follower in followers:
            if not follower.pipe.poll(START_SECONDS):
                raise RuntimeError(f"rank {follower.rank} has not answered for {START_SECONDS:g} s")
            good, reply = pickle.loads(follower.pipe.recv_bytes())
            if not good:
                raise ValueError(f"rank {follower.rank}: {reply}")
            found.append(reply)
        return found

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        """Names the rank that has ended or hangs, where something fails because of that."""
        if self.failure:
            raise RuntimeError(f"{self.failure} before {what}")
        try:
            yield
        except (OSError, EOFError, RuntimeError) as error:
            nested = self.others and self.same
            if self.watch.failed.wait(NESTED_VERDICT_SECONDS if nested else VERDICT_SECONDS):
                raise RuntimeError(f"{self.failure} during {what}") from error
            raise
        if self.failure:  # collectives that were aborted give no numbers
            raise RuntimeError(f"{self.failure} during {what}")

    def _carried_out(self) -> None:
        """This rank has done its part of all orders."""
        for follower in self.followers:
            follower.num_due = follower.num_told


class WatchedFetch:
    """Waits for results of a step on a device, where a collective that was aborted ends."""

    def __init__(self, fetch: Fetch, watched: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        self.fetch, self.watched = fetch, watched

    def wait(self) -> torch.Tensor:
        with self.watched("a step"):
            return self.fetch.wait()


class Store:
    """A file for Keys; on Linux without a name in the file system, so that no end leaves it."""

    def __init__(self) -> None:
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        if sys.platform == "linux":
            path = f"/proc/{os.getpid()}/fd/{_memory_file(os.getpid())}"
        else:
            self.folder = tempfile.TemporaryDirectory(prefix="anabranch-ranks-")
            path = f"{self.folder.name}/store"
        self.keys = path, str(time.monotonic_ns())

    def close(self) -> None:
        if self.folder is not None:
            self.folder.cleanup()


@functools.cache
def _memory_file(pid: int) -> int:
    """One for all engines of a process, and never closed: who holds an engine's process group may hold it for longer
    than the engine, its destructor opens the path again, and the number would be that of another file."""
    return os.memfd_create("anabranch-ranks")


def leads(rank: int, config: EngineConfig) -> bool:
    """Whether a rank is the first of an engine, and not the driver."""
    return config.data_parallel_size > 1 and rank > 0 and rank % config.tensor_parallel_size == 0


def find_environments(rank: int, config: EngineConfig, platform: Platform) -> list[Environment]:
    """What gives a rank its device, and then those that it starts. To be called where all devices are seen."""
    near = config.num_ranks // config.nodes
    last = rank + (config.tensor_parallel_size if leads(rank, config) else 1)
    return [platform.rank_environment(each % near) for each in range(rank, last)]


def start(
    rank: int, config: EngineConfig, store: Keys | TorchStore | None, environments: Sequence[Environment]
) -> Follower:
    """A rank on this machine; without a store it is the one of several nodes."""
    ours, theirs = multiprocessing.Pipe()
    beats, their_beats = multiprocessing.Pipe()
    arguments = rank, config, store, theirs, their_beats, environments[1:]
    process = spawn(follow, arguments, f"rank {rank}", environments[0])
    theirs.close()
    their_beats.close()
    return Follower(rank, process, ours, beats)


def spawn(
    target: Callable[..., None], arguments: tuple[Any, ...], name: str, environment: Environment
) -> multiprocessing.process.BaseProcess:
    """A process with one of this machine's devices."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name, daemon=True)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        process.start()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return process


def join(rank: int, size: int, platform: Platform, store: Keys | TorchStore) -> Group:
    """The group of all ranks. `store`: Keys where all are on this machine."""
    alone = isinstance(store, tuple)
    if platform.device.type == "cpu":
        here = size if alone else size // int(os.environ["WORLD_SIZE"])
        torch.set_num_threads(max(1, torch.get_num_threads() // here))
    if alone or nodes.is_loopback(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    if isinstance(store, tuple):
        store = dist.PrefixStore(store[1], dist.FileStore(store[0], size))  # type: ignore[attr-defined]
    timeout = timedelta(seconds=STEP_SECONDS)
    dist.init_process_group(platform.collective_backend, store=store, rank=rank, world_size=size, timeout=timeout)
    assert dist.group.WORLD is not None
    return TorchGroup(dist.group.WORLD)


def follow_here(config: EngineConfig) -> int | None:
    """The life of the process of a node other than the first: start its ranks, and wait for them to end. Returns the
    exit code; on the first node None, at once."""
    place = nodes.place(config)
    if place is None or place.node == 0:
        return None
    platform = platforms.current()
    ranks = [rank for rank, _ in started_ranks(place.node, config)]
    return follow_ranks(place, {rank: find_environments(rank, config, platform) for rank in ranks})


def started_ranks(node: int, config: EngineConfig) -> Iterator[tuple[int, int]]:
    """Ranks that the process of a node other than the first starts: with how many devices for it and its own."""
    count = config.num_ranks // config.nodes
    for rank in range(node * count, (node + 1) * count):
        if config.data_parallel_size == 1 or leads(rank, config):
            yield rank, config.tensor_parallel_size if config.data_parallel_size > 1 else 1


def follow_ranks(place: nodes.Place, environments: dict[int, list[Environment]]) -> int:
    """Start these ranks, and wait for them to end. Returns the exit code."""
    ranks, ends, pipes, links = [], list[Any](), {}, list[Connection]()
    for rank, (environment, *more) in environments.items():
        pipes[rank], theirs = multiprocessing.Pipe()
        ranks.append(spawn(follow_far, (rank, place, theirs, more), f"rank {rank}", environment))
        ends.append(ranks[-1].sentinel)
        theirs.close()
    for rank, pipe in pipes.items():
        if pipe in wait([pipe, *ends]):
            with contextlib.suppress(EOFError, OSError):
                links.append(nodes.connect(place, pipe.recv(), rank, "node"))
    ready = wait([*ends, *links])
    deadline = time.monotonic() + VERDICT_SECONDS
    if any(more for _, *more in environments.values()):  # followers of their own, which they have to end first
        time.sleep(VERDICT_SECONDS)
    elif not any(says_end(link) for link in links if link in ready):
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))  # the others have the same reason to end
    for process in ranks:
        process.kill()
        process.join()
    return int(any(process.exitcode for process in ranks))


def says_end(link: Connection) -> bool:
    """True: the driver has ended the rank, which may not notice. False: the rank or the connection has ended."""
    try:
        return link.recv_bytes() == END
    except (EOFError, OSError):
        return False


def follow_far(rank: int, place: nodes.Place, parent: Connection, environments: Sequence[Environment]) -> None:
    """The life of a follower on another node than the driver. `parent` gets to know where the driver is."""
    store = nodes.open_store(rank, START_SECONDS)
    gate = store.get(nodes.ORDERS).decode()
    parent.send(gate)
    pipe, beats = (nodes.connect(place, gate, rank, link) for link in nodes.LINKS[:2])
    follow(rank, pickle.loads(pipe.recv_bytes()), store, pipe, beats, environments)


def follow(
    rank: int,
    config: EngineConfig,
    store: Keys | TorchStore | None,
    pipe: Connection,
    beats: Connection,
    environments: Sequence[Environment],
) -> None:
    """The life of a follower: load, then do what the driver says until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends the others
    pulse = Pulse(beats, speaks=rank == 1 or rank % (config.num_ranks // config.nodes) == 0)
    pulse.start()

    def reply(work: Callable[[], Any]) -> bool:
        try:
            message = True, work()
        except Exception as error:
            message = False, str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            pipe.send_bytes(pickle.dumps(message, protocol=5))
        return message[0]

    runner: Any = None
    platform = platforms.current()

    def load() -> None:
        nonlocal runner
        size = config.num_ranks
        found = nodes.open_store(rank, START_SECONDS) if store is None else store
        if leads(rank, config):
            # A daemon may have no children, because its end would leave them; ours end with their pipes.
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
            runner = resolve_name(f"{DATA_PARALLEL}:DataParallelRank")(config, platform, rank, found, environments)
        else:
            runner = RankRunner(config, platform, None, join(rank, size, platform, found))

    if not (reply(lambda: None) and reply(load)):
        return
    assert runner is not None
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = pipe.recv_bytes()
            pulse.begin()
            name, args = pickle.loads(message)
            try:
                if name in ("num_pages", "allocate", "warm_up"):
                    reply(lambda name=name, args=args: getattr(runner, name)(*args))  # type: ignore[misc]
                else:
                    found = getattr(runner, name)(*args)
                    if name in ANSWERED:
                        pipe.send_bytes(pickle.dumps((True, found), protocol=5))
            except Exception as error:
                pulse.fail(error)
                os._exit(1)
            pulse.end()
    os._exit(0)  # not through torch.distributed's destructors, which wait for ranks that are gone
