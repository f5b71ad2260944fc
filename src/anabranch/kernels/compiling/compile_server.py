"""Starts, uses and ends a process that compiles kernels while this one does other work.

The process imports torch and the kernels once and forks a child for each job: the import is paid once, and no process
with an open device is forked. `start_early` is for the first lines of a program, before torch is imported, so that both
imports run in parallel. This file imports nothing heavy; `precompile` defines jobs, `compile_jobs` runs in the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from pathlib import Path

log = logging.getLogger(__name__)

MODULE = "anabranch.kernels.compiling.compile_jobs"
CANCEL = None
"""Sent instead of a batch: stop the running one."""
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""One of them exists where there is a GPU that Triton compiles for."""
OUT_OF_TIME = "out of time"

_server: CompileServer | None = None


class CompileServer:
    def __init__(self) -> None:
        # No visible device, so that it cannot open one by mistake; each job contains its target.
        hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self._connection, other = Pipe()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=[other.fileno()],
                env={**environment, **hidden},
            )
        self._num_cancelled = 0
        """Cancelled batches that have not ended: their answers are ignored."""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def compile(
        self,
        jobs: Sequence[bytes],
        *,
        workers: int,
        environment: dict[str, str],
        done: Callable[[int, float, str | None], None],
        deadline: float | None,
    ) -> str | None:
        """Compile pickled jobs in order, `workers` at a time. `done(job's index, seconds, error)` is called for each
        that ends. Returns why the others did not end, None if all did.

        `deadline` is a time.monotonic(). `environment`: the variables that the jobs' cache keys depend on.
        """
        if not self._send((list(jobs), workers, sys.path, environment)):
            return self._exit_reason()
        while True:
            if not self._connection.poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                self._num_cancelled += 1
                self._send(CANCEL)
                return OUT_OF_TIME
            try:
                answer = self._connection.recv()
            except (EOFError, OSError):
                return self._exit_reason()
            if self._num_cancelled:
                self._num_cancelled -= answer is None
            elif answer is None:
                return None
            else:
                done(*answer)

    def _send(self, message: object) -> bool:
        try:
            self._connection.send(message)
        except OSError:
            return False
        return True

    def _exit_reason(self) -> str:
        code = self._process.wait()
        self._printed.seek(0)
        last = self._printed.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"the compiling process ended with exit code {code}" + (f": {last[0]}" if last else "")

    def close(self) -> None:
        """End the process and its children at once."""
        self._process.kill()  # its children end with it, see compile_jobs
        self._process.wait()
        self._connection.close()
        self._printed.close()


def start() -> CompileServer:
    """The running server, or a new one."""
    global _server
    if _server is None or not _server.alive:
        close()
        _server = CompileServer()
    return _server


def running() -> bool:
    return _server is not None and _server.alive


@atexit.register
def close() -> None:
    """End the server, if there is one, to free its memory."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def start_early() -> bool:
    """Start the server if this looks like the first start on a machine with a GPU: there is a device, and Triton's
    cache is empty. Otherwise it is started when something has to be compiled. Returns whether it was started."""
    platform = os.environ.get("ANABRANCH_PLATFORM", "cuda")
    gpu = platform in ("cuda", "hip", "xpu") and any(os.path.exists(file) for file in DEVICE_FILES)
    if running() or not gpu or os.environ.get("TRITON_INTERPRET") == "1" or not _cache_is_empty():
        return False
    start()
    return True


def _cache_is_empty() -> bool:
    # The same rule as Triton's, which is not imported yet.
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    return not cache.is_dir() or not any(cache.iterdir())
