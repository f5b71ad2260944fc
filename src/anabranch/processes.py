"""A process seen from another: how it has ended, in words, and when it counts as stopped; and one that ends with its
parent. Knows no messages."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
DOUBT = 2.0
"""The last seconds of a silence. Who listens may have been stopped itself: in these it reads what has come."""

patience: float | None = None
"""Seconds for which this process may send no heartbeat, by which it is known to be stopped. None: it is not judged by
them. Set where it drives other ranks, who wait for it."""


def die_with(parent: int) -> None:
    """End with the parent: Linux kills this process when the thread that started it ends."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            log.warning("prctl: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def silent(rank: int, seconds: float) -> str:
    return f"rank {rank} of the model hangs: no heartbeat for {seconds:g} s"


def exit_text(exit_code: int | None) -> str:
    """How the engine's process ended, in words."""
    if exit_code is None:
        return "the engine's process ended"
    if exit_code >= 0:
        return f"the engine's process ended with exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        name = f"signal {-exit_code}"
    hint = " (by an operator, or by the system because memory ran out)" if -exit_code == signal.SIGKILL else ""
    return f"the engine's process was killed by {name}{hint}"


class Silence:
    """Calls `found`, with a line, when the process of rank 0 has been silent for longer than it may be."""

    def __init__(self, loop: asyncio.AbstractEventLoop, found: Callable[[str], None]) -> None:
        self.loop, self.found = loop, found
        self.timer: asyncio.TimerHandle | None = None

    def broken(self, patience: float | None) -> None:
        """A heartbeat has come; the next may take so long."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = None if patience is None else self.loop.call_later(patience - DOUBT, self._doubt, patience)

    def _doubt(self, patience: float) -> None:
        self.timer = self.loop.call_later(DOUBT, self.found, silent(0, patience))
