"""The one thread that calls MLX: its streams belong to the thread that made them, and steps come from any thread.

The thread clears its streams before it ends: at the end of the process that would race with the process's own clean-up
and sometimes abort it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

import mlx.core as mx

Result = TypeVar("Result")
Work = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class MlxThread:
    def __init__(self) -> None:
        self._work: Work = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._work,), name="mlx", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, self._work, thread)
        """Ends the thread, once; called when this object is collected and when Python ends."""

    def run(self, work: Callable[[], Result]) -> Result:
        """Call `work` there; returns or raises what it does."""
        assert self.close.alive, "the thread has ended"
        future: Future[Result] = Future()
        self._work.put((future, work))
        try:
            return future.result()
        except KeyboardInterrupt:  # the work goes on: the next call must find it done
            wait([future])
            raise


def _serve(queue: Work) -> None:
    while (item := queue.get()) is not None:
        future, work = item
        try:
            future.set_result(work())
        except BaseException as error:  # the caller's to handle, whatever it is
            future.set_exception(error)
        del item, future, work  # not kept alive until the next one
    mx.synchronize()
    mx.clear_streams()


def _end(queue: Work, thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join()
