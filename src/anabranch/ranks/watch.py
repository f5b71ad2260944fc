"""Watches the other ranks of a model: one that ends or hangs ends all of them, and is named.

A follower sends heartbeats from a thread of its own, with the number of orders that it has carried out. The driver's
thread knows then, whatever its main thread is waiting for:

- a process that has ended, at once;
- one without a heartbeat for HANG_SECONDS, because it was stopped or something holds the interpreter;
- one that has not carried out an order HANG_SECONDS after the driver has, though its heart beats;
- one that has an order and is in no collective, while another has waited inside one for HANG_SECONDS, and for PATIENT
  times as long as any rank has computed between two collectives of this order.

The last rule tells a rank that hangs from one with a long prompt, where all compute for long. A rank that compiles has
START_SECONDS, and the rule does not hold until all ranks are warm. Where ranks have requests of their own, one may have
a prompt and the others no rows: until it has made one step of that size, it has START_SECONDS to compute what comes
before the first collective, if its CPU is busy.

The driver's thread sends heartbeats too, with the seconds for which it may be silent. When it is for longer, because it
was stopped, its followers end, and one of each node names it. A server hears the driver by heartbeats of its own, with
the same patience, and kills it (engine.client). A driver whose heart beats is left to the server's limit of a step.

The driver may wait for that follower inside a collective. All followers are killed, which closes their connections and
ends the wait with an error; collectives of a device are aborted, and small sums there released.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from anabranch import processes
from anabranch.parallel.collective_ops import GROUPS
from anabranch.parallel.group import PRESENCE, abort
from anabranch.ranks.nodes import hang_up

log = logging.getLogger(__name__)

BEAT = 0.5
"""Seconds between two heartbeats."""
HANG_SECONDS = 7.0
START_SECONDS = 60.0
"""In place of HANG_SECONDS until all ranks are warm: imports and compilers may hold the interpreter for long."""
PATIENT = 10.0
"""Times that a rank may compute longer than others between two collectives: one may have all tokens in its experts."""
COMPILERS = ("triton.compiler", "torch._dynamo", "torch._inductor")
"""Modules in which a rank compiles."""
SETTLE_SECONDS = 0.2
"""After the first sign, for others: when a rank is killed, the ranks that wait for it fail too."""
NESTED_SETTLE_SECONDS = 0.8
"""The same, where other ranks have followers of their own, and name them."""


END = b"end"
"""To the process that has started a rank on another node: do not wait for the rank to end."""


class Beat(NamedTuple):
    """What a rank says of itself with a heartbeat."""

    num_done: int = 0
    """Orders that it has carried out."""
    busy: bool = False
    """It has an order that is not carried out."""
    inside: bool = False
    """It is in a collective."""
    seconds: float = 0.0
    """For so long it has been in one, or in none."""
    longest: float = 0.0
    """The most that it has computed between two collectives of this order."""
    compiling: bool = False
    first: bool = False
    """See Presence.is_first."""


@dataclass(slots=True, eq=False)
class Follower:
    """Another rank, as the driver knows it."""

    rank: int
    process: multiprocessing.process.BaseProcess | None
    """None: it is on another node."""
    pipe: Connection
    """Orders to it, replies from it."""
    beats: Connection
    """Heartbeats, from both sides."""
    node: Connection | None = None
    """With the process that has started it, if that is on another node."""
    num_told: int = 0
    num_due: int = 0
    """Orders that the driver has carried out itself."""
    beat: Beat = field(default_factory=Beat)
    """The latest."""
    error: str = ""
    heard: float = field(default_factory=time.monotonic)
    target: int = 0
    """Orders that it has to have carried out, `since` then."""
    since: float = field(default_factory=time.monotonic)

    @property
    def exit_code(self) -> int | None:
        return None if self.process is None else self.process.exitcode

    def end(self) -> None:
        """End it; on another node it ends when its connections do, or its node's process, which is told to, ends it."""
        if self.process is not None:
            self.process.kill()
        if self.node is not None:
            with contextlib.suppress(OSError):
                self.node.send_bytes(END)
        for connection in (self.pipe, self.beats, self.node) if self.node is not None else ():
            with contextlib.suppress(OSError):
                hang_up(connection)


class Watch(threading.Thread):
    """The driver's thread. `failure` is the line that names a rank; then all followers have been killed."""

    def __init__(self, followers: Sequence[Follower], rank: int = 0) -> None:
        """`rank`: of this process. Only rank 0 sends heartbeats: if another has followers, rank 0 watches both."""
        super().__init__(name="watch-ranks", daemon=True)
        self.followers, self.rank = followers, rank
        self.thread = threading.get_ident()
        """Which tells the others what to do."""
        self.settle_seconds = SETTLE_SECONDS
        self.warm = False
        """Whether ranks compile and capture nothing more, but by chance."""
        self.failure = ""
        self.failed, self.closed = threading.Event(), threading.Event()
        self.ending, self.end = multiprocessing.Pipe(duplex=False)

    def run(self) -> None:
        beats = {follower.beats: follower for follower in self.followers}
        clock, sent = Clock(), 0.0
        while not self.failure:
            near = [follower.process for follower in self.followers if follower.process is not None]
            sentinels = [process.sentinel for process in near if process.exitcode is None]
            ready = wait([self.ending, *beats, *sentinels], BEAT)
            if self.ending in ready:
                return
            now = time.monotonic()
            if clock.was_stopped(now):  # it could not hear the others
                for follower in self.followers:
                    follower.heard = follower.since = now
            for pipe in [pipe for pipe in beats if pipe in ready]:
                if not _listen(beats[pipe], now):
                    del beats[pipe]
            inside, since = PRESENCE.now
            own = Beat(inside=inside, seconds=clock.seconds(since, now), longest=PRESENCE.longest)
            if self.rank == 0 and now - sent >= BEAT:
                sent = now
                self._beat(own, list(beats))
            if self._killed() or self._ended():
                time.sleep(self.settle_seconds)
                for follower in beats.values():
                    _listen(follower, now)
                self.failure = self._killed() or self._ended()
            else:
                self.failure = self._hanging(now, own)
        log.error("%s: all ranks are ended", self.failure)
        for follower in self.followers:
            follower.end()
        self.failed.set()
        aborting = threading.Thread(target=abort, name="abort-collectives", daemon=True)  # may wait for the device
        aborting.start()
        groups, idle, deadline = GROUPS.copy(), [False], now + START_SECONDS  # it may compile before it sums
        with contextlib.suppress(RuntimeError):  # the device has failed, and waits for nothing
            while time.monotonic() < deadline and not (all(idle) and self.closed.is_set()):
                idle = [group.one_shot is None or group.one_shot.release() for group in groups.values()]
                time.sleep(BEAT / 10 if all(idle) else 0.001)
        aborting.join()

    def close(self) -> None:
        """Stop watching; the followers may end now."""
        self.closed.set()
        if self.is_alive():
            self.end.send(None)
            self.join(HANG_SECONDS)
        self.ending.close()
        self.end.close()
        processes.patience = None

    def _beat(self, own: Beat, pipes: list[Connection]) -> None:
        compiling = not own.inside and own.seconds > 2 * BEAT and is_compiling(self.thread)
        processes.patience = patience = HANG_SECONDS if self.warm and not compiling else START_SECONDS
        for pipe in pipes:
            with contextlib.suppress(OSError):  # it has ended: it will be named
                pipe.send(patience)

    def _killed(self) -> str:
        for follower in self.followers:
            if (code := follower.exit_code or 0) < 0:
                return f"rank {follower.rank} of the model was ended by {signal.Signals(-code).name}"
        return ""

    def _ended(self) -> str:
        """Exit code 0 is not among these: such a rank has replied with an error, or the driver has closed its pipe."""
        failed = [follower for follower in self.followers if follower.error]
        for follower in failed:
            if follower.error.startswith("rank "):  # of one that it has started
                return follower.error
        for follower in failed:
            return f"rank {follower.rank} of the model failed: {follower.error}"
        for follower in self.followers:
            if code := follower.exit_code:
                return f"rank {follower.rank} of the model has ended with exit code {code}"
        return ""

    def _hanging(self, now: float, own: Beat) -> str:
        """`own`: of this process."""
        beats = [own, *(follower.beat for follower in self.followers)]
        waited = max((beat.seconds for beat in beats if beat.inside), default=0.0)
        longest = max(beat.longest for beat in beats)
        for follower in self.followers:
            beat = follower.beat
            patience = HANG_SECONDS if self.warm and not beat.compiling else START_SECONDS
            hangs = f"rank {follower.rank} of the model hangs:"
            if now - follower.heard > patience:
                return processes.silent(follower.rank, patience)
            patience = START_SECONDS if beat.first else patience
            if beat.num_done < follower.target and now - follower.since > patience:
                return f"{hangs} {patience:g} s behind rank 0"
            absent = min(beat.seconds, waited) if self.warm and beat.busy and not beat.inside else 0.0
            if absent > max(patience, PATIENT * longest):
                return f"{hangs} others have waited for it for {absent:.0f} s"
        return ""


def _listen(follower: Follower, now: float) -> bool:
    """Read its heartbeats; False if there will be no more."""
    try:
        while follower.beats.poll():
            beat = follower.beats.recv()
            if isinstance(beat, str):
                follower.error = beat
            else:
                follower.beat, follower.heard = beat, now
    except (EOFError, OSError):
        if follower.process is None:
            follower.error = follower.error or "its connection has ended"
        return False
    if follower.beat.num_done >= follower.target:
        follower.target, follower.since = follower.num_due, now
    return True


class Clock:
    """Leaves out the time in which this process was stopped as a whole, as by Ctrl-Z. Is read every BEAT."""

    def __init__(self) -> None:
        self.read = self.began = time.monotonic()

    def was_stopped(self, now: float) -> bool:
        stopped = now - self.read > 4 * BEAT
        self.read = now
        if stopped:
            self.began = now
        return stopped

    def seconds(self, since: float, now: float) -> float:
        return now - max(since, self.began)


class Pulse(threading.Thread):
    """A follower's thread: heartbeats, and an end for this process when the driver has ended or is silent, whatever the
    main thread waits for."""

    def __init__(self, pipe: Connection, speaks: bool = True) -> None:
        """`speaks`: of a driver that is silent. One is enough."""
        super().__init__(name="pulse", daemon=True)
        self.speaks = speaks
        self.heard, self.patience = 0.0, math.inf
        """Of the driver: when, and how long from then on. The first heartbeat comes when all ranks have."""
        self.pipe, self.lock = pipe, threading.Lock()
        self.thread = threading.get_ident()
        """Which carries out orders."""
        self.num_done, self.busy = 0, False

    def run(self) -> None:
        clock = Clock()
        while True:
            (inside, since), now = PRESENCE.now, time.monotonic()
            if clock.was_stopped(now):
                self.heard = now
            if self._is_driver_silent(now):
                self._end_without_driver()
            seconds = clock.seconds(since, now)
            compiling = self.busy and not inside and seconds > 2 * BEAT and is_compiling(self.thread)
            first = self.busy and PRESENCE.is_first(seconds)
            self.send(Beat(self.num_done, self.busy, inside, seconds, PRESENCE.longest, compiling, first))
            time.sleep(BEAT)

    def _is_driver_silent(self, now: float) -> bool:
        try:
            while self.pipe.poll():
                self.patience, self.heard = self.pipe.recv(), now
        except (EOFError, OSError):  # it has ended: `send` ends this process
            return False
        return now - self.heard > self.patience

    def _end_without_driver(self) -> None:
        reason = processes.silent(0, self.patience)
        if self.speaks:
            log.error("%s: all ranks are ended", reason)
        self.fail(RuntimeError(reason))  # for a driver that goes on later
        time.sleep(1.5 * BEAT)  # the others notice it too before collectives with this one fail
        os._exit(1)

    def begin(self) -> None:
        """An order has come."""
        PRESENCE.begin()
        self.busy = True

    def end(self) -> None:
        self.num_done, self.busy = self.num_done + 1, False

    def fail(self, error: Exception) -> None:
        log.debug("this rank fails", exc_info=error)
        named = str(error).startswith("rank ")
        text = str(error).partition(" during ")[0] if named else f"{type(error).__name__}: {error}"
        self.send(" ".join(text.split())[:2000])

    def send(self, beat: Beat | str) -> None:
        with self.lock:
            try:
                self.pipe.send(beat)
            except OSError:
                os._exit(1)


def is_compiling(thread: int) -> bool:
    """Whether a thread is inside a compiler."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(COMPILERS):
            return True
        frame = frame.f_back
    return False
