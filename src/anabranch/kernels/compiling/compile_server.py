"""Starts, uses and ends a process that compiles kernels while this one does other work.

The process imports torch and the kernels once and forks a child for each job: the import is paid once, and no process
with an open device is forked. `start_early` is for the first lines of a program, before torch is imported, so that both
imports run in parallel. This file knows processes and pipes and imports nothing heavy; `precompile` defines jobs,
`compile_jobs` runs in the process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import pickle
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

MODULE = "anabranch.kernels.compiling.compile_jobs"
CANCEL = b"\xff" * 8
"""Sent instead of the length of a batch: stop the running one."""
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
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**environment, **hidden},
        )
        self._rest = b""
        """The beginning of an incomplete line."""
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
        assert self._process.stdout is not None
        frame = pickle.dumps((list(jobs), workers, sys.path, environment))
        if not self._send(len(frame).to_bytes(8, "little") + frame):
            return self._exit_reason()
        descriptor = self._process.stdout.fileno()
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], wait)[0]:
                self._num_cancelled += 1
                self._send(CANCEL)
                return OUT_OF_TIME
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return self._exit_reason()
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                found = json.loads(line)
                if self._num_cancelled:
                    self._num_cancelled -= found is None
                elif found is None:
                    return None
                else:
                    done(*found)

    def _send(self, data: bytes) -> bool:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def _exit_reason(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"the compiling process ended with exit code {code}" + (f": {last[0]}" if last else "")

    def close(self) -> None:
        """End the process and its children at once."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()  # its children end with it, see compile_jobs
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def start() -> CompileServer:
    """The running server, or a new one."""
    global _server
    if _server is None or not _server.alive:
        if _server is not None:
            _server.close()
        else:
            atexit.register(close)
        _server = CompileServer()
    return _server


def running() -> bool:
    return _server is not None and _server.alive


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
