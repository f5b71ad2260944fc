"""Work that ends with its purpose: tasks that are cancelled with the block that started them, and a pool of daemon
threads, where work that never ends cannot delay the end of the process.

`concurrent.futures.ThreadPoolExecutor` waits for its threads when the interpreter exits, and asyncio for those of its
default executor. A chat template that loops and a read from a pipe cannot be stopped, so here nothing waits for them.
"""

import asyncio
import contextlib
import ctypes
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
Job = tuple[Future[Any], Callable[[], Any]]


@contextlib.asynccontextmanager
async def tasks(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Start tasks; at the end of the block, cancel and await those that have not finished."""
    started = [asyncio.create_task(one) for one in work]
    try:
        yield started
    finally:
        for task in started:
            task.cancel()
        await asyncio.gather(*started, return_exceptions=True)


class Threads(Executor):
    def __init__(self, num_threads: int, name: str) -> None:
        self.num_threads, self.name = num_threads, name
        self.num_started = 0
        self.running: set[Future[Any]] = set()
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            if self.num_started < self.num_threads:
                name = f"{self.name}-{self.num_started + 1}"
                try:
                    threading.Thread(target=self._run, name=name, daemon=True).start()
                    self.num_started += 1
                except RuntimeError:  # the system refuses more threads now
                    if not self.num_started:
                        raise
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _run(self) -> None:
        while True:
            self._do(*self._jobs.get())

    def _do(self, future: Future[Any], work: Callable[[], Any]) -> None:
        """A separate function, so that no reference to a job is kept until the next one comes."""
        if not future.set_running_or_notify_cancel():
            return
        self.running.add(future)
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            self.running.discard(future)


def release_memory() -> None:
    """Return freed memory to the system: glibc keeps what a thread has freed for that thread."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries return it themselves
        if trim is not None:
            trim(0)
