"""A process that compiles kernels while this one does something else: how it is started, asked and ended.

It imports torch and the kernels once and forks a child for each job, so nobody pays that import twice and nobody forks
a process that has a device open. `start_early` is for the first lines of a program, before torch is imported: the two
imports then run side by side. This file knows processes and pipes and imports nothing heavy; what a job is stands in
triton/precompile.py, what is done with it in triton/compile_jobs.py.
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

MODULE = "anabranch.kernels.triton.compile_jobs"
CANCEL = b"\xff" * 8
"""Sent instead of the length of a batch: give up the one that runs."""
DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""One of them is there where Triton has a GPU to compile for."""

_server: CompileServer | None = None


class CompileServer:
    def __init__(self) -> None:
        # Without a visible device it cannot open one by mistake; the target is part of each job.
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
        """The beginning of a line whose end has not come."""
        self._num_cancelled = 0
        """Batches that were given up and have not ended: what comes until then is of no interest."""

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
        """Compile pickled jobs, `workers` at a time, in their order. `done(job's place, seconds, error)` is called for
        each that ends. Returns why the others did not, if there are any.

        `deadline` is a time.monotonic(). `environment` is what the jobs' cache keys depend on.
        """
        assert self._process.stdout is not None
        frame = pickle.dumps((list(jobs), workers, sys.path, environment))
        if not self._send(len(frame).to_bytes(8, "little") + frame):
            return self._epitaph()
        descriptor = self._process.stdout.fileno()
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([descriptor], [], [], wait)[0]:
                self._num_cancelled += 1
                self._send(CANCEL)
                return "there was no more time"
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                return self._epitaph()
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

    def _epitaph(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        last = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"the compiling process ended with exit code {code}" + (f": {last[0]}" if last else "")

    def close(self) -> None:
        """End it and its children, whatever they are doing."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()  # its children go with it, see compile_jobs
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def start() -> CompileServer:
    """The running server, else a new one."""
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
    """Nothing more will be compiled: give its memory back."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def start_early() -> bool:
    """Start the server if this looks like a first start on a machine with a GPU: there is a device, and Triton's cache
    is empty. Otherwise it is started when there turns out to be something to compile. Whether it was started."""
    platform = os.environ.get("ANABRANCH_PLATFORM", "cuda")
    gpu = platform in ("cuda", "hip", "xpu") and any(os.path.exists(file) for file in DEVICE_FILES)
    if running() or not gpu or os.environ.get("TRITON_INTERPRET") == "1" or not _cache_is_empty():
        return False
    start()
    return True


def _cache_is_empty() -> bool:
    # Triton's own rule for the place; Triton is not imported yet.
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"))
    return not cache.is_dir() or not any(cache.iterdir())
