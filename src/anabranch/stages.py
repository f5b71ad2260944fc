"""What a start spends its time on: import, config, weights, tune, allocate, compile, capture and the rest.

    stages = Stages.of_process()
    with stages.shared():                # `stage("...")` anywhere below adds to this table
        with stage("weights"):
            ...
            count(num_bytes)             # bytes that this stage moves, for its GB/s

A stage inside another stops the clock of the outer one, so that the seconds add up. Outside `shared`, `stage` does
nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

ORDER = ("import", "config", "weights", "tune", "allocate", "compile", "capture")
"""The order in tables; other stages follow in the order in which they began."""

_current: ContextVar[Stages | None] = ContextVar("stages", default=None)


class Stages:
    def __init__(self, since: float | None = None, on_begin: Callable[[str], None] | None = None) -> None:
        """`since`: the time.perf_counter() at which the table begins (default: now). `on_begin` is called with the name
        of each stage that begins."""
        self.began = time.perf_counter() if since is None else since
        self.seconds: dict[str, float] = {}
        self.num_bytes: dict[str, int] = {}
        self.ready: float | None = None
        """Seconds from the beginning to `finish`; None before."""
        self.others: dict[str, float] = {}
        """Seconds outside of all stages, by the stage that ended last before them."""
        self._on_begin = on_begin
        self._running: list[str] = []
        self._ended = "start"
        self._clock = self.began

    @classmethod
    def of_process(cls, on_begin: Callable[[str], None] | None = None) -> Stages:
        """Of a process that exists for this start: its time up to now counts as import."""
        stages = cls(process_start(), on_begin)
        stages._clock = time.perf_counter()
        stages.seconds["import"] = stages._clock - stages.began
        return stages

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._advance()
        self._running.append(name)
        self.seconds.setdefault(name, 0.0)
        if self._on_begin is not None:
            self._on_begin(name)
        try:
            yield
        finally:
            self._advance()
            self._ended = self._running.pop()

    def _advance(self) -> None:
        """Add the time since the last call to the stage that was running."""
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] += now - self._clock
        else:
            self.others[self._ended] = self.others.get(self._ended, 0.0) + now - self._clock
        self._clock = now

    def skip(self, seconds: float) -> None:
        """Leave out time that was not part of this start."""
        self.began += seconds
        self._clock += seconds

    def count(self, num_bytes: int) -> None:
        if self._running:
            name = self._running[-1]
            self.num_bytes[name] = self.num_bytes.get(name, 0) + num_bytes

    @contextlib.contextmanager
    def shared(self) -> Iterator[Stages]:
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def finish(self) -> None:
        """The start is complete; later time does not count."""
        self._advance()
        self.ready = time.perf_counter() - self.began

    def check(self) -> None:
        assert not self._running, f"{self._running} have not ended"
        assert all(seconds >= 0 for seconds in self.seconds.values())
        assert self.ready is None or sum(self.seconds.values()) <= self.ready + 1e-6

    def _rows(self) -> list[tuple[str, float]]:
        names = sorted(self.seconds, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))
        rows = [(name, self.seconds[name]) for name in names]
        if self.ready is not None:
            rows += [("other", max(0.0, self.ready - sum(self.seconds.values()))), ("ready", self.ready)]
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Seconds by stage, with "other" and "ready" (the sum); "other" by the stage that it follows; bytes and bytes
        per second where counted."""
        found: dict[str, Any] = {"seconds": {name: round(seconds, 4) for name, seconds in self._rows()}}
        found["other_after"] = {name: round(seconds, 4) for name, seconds in self.others.items()}
        if self.num_bytes:
            found["bytes"] = dict(self.num_bytes)
            found["bytes_per_second"] = {
                name: round(count / max(self.seconds[name], 1e-9)) for name, count in self.num_bytes.items()
            }
        return found

    def table(self) -> str:
        """A line per stage, such as `weights    1.90 s   61.1 GB, 32.2 GB/s`."""
        lines = []
        for name, seconds in self._rows():
            line = f"{name:<8} {seconds:8.2f} s"
            if count := self.num_bytes.get(name):
                line += f"   {count / 1e9:.2f} GB, {count / 1e9 / max(seconds, 1e-9):.1f} GB/s"
            lines.append(line)
        return "\n".join(lines)


def stage(name: str) -> contextlib.AbstractContextManager[None]:
    """A stage of the start that is running in this context, if any."""
    stages = _current.get()
    return contextlib.nullcontext() if stages is None else stages(name)


def count(num_bytes: int) -> None:
    """Add to the bytes that the running stage has moved."""
    stages = _current.get()
    if stages is not None:
        stages.count(num_bytes)


def process_start() -> float:
    """When this process began, as a time.perf_counter(), to 0.01 s; outside Linux, when this file was imported."""
    if sys.platform == "linux":
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.perf_counter() - max(0.0, age)
    return _imported


_imported = time.perf_counter()
