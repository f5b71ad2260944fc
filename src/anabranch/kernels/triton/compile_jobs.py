"""The compiling process: `python -m anabranch.kernels.triton.compile_jobs`. Reads batches of jobs on standard input,
forks a child for each job, writes a line of JSON for each that ends ([place, seconds, error or null]), null after all.

It never opens a device. It ends when its input does, or when nobody asked for anything for a while; its children end
with it. Its other end is kernels/compile_server.py.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import pickle
import pkgutil
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

import anabranch.kernels.triton as kernels
from anabranch.kernels.compile_server import CANCEL
from anabranch.kernels.triton.precompile import ENVIRONMENT, one_line

IDLE_SECONDS = 300.0
"""A server whose program is ready is not needed any more; a second model would start another."""
PR_SET_PDEATHSIG = 1


def preload() -> None:
    """What every child would do first, done once."""
    for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."):
        if not module.name.endswith(".compile_jobs"):  # this file, which runs as __main__
            with suppress(ImportError):  # Gluon's are for some Tritons only
                importlib.import_module(module.name)
    from triton.runtime.cache import triton_key

    triton_key()  # the hash of Triton itself, 0.3 s
    with suppress(Exception):  # no driver here: the program that needs it will say so
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()  # compiles a piece of C that every program needs first


def serve(source: int, answers: int) -> None:
    while select.select([source], [], [], IDLE_SECONDS)[0]:
        head = read_exactly(source, len(CANCEL))
        if not head:
            return
        if head == CANCEL:  # of a batch that had just ended
            continue
        frames, workers, path, environment = pickle.loads(read_exactly(source, int.from_bytes(head, "little")))
        sys.path[:] = path
        for name in [name for name in os.environ if name.startswith(ENVIRONMENT)]:
            del os.environ[name]
        os.environ.update(environment)
        compile_all(frames, workers, source, answers)
        write_all(answers, b"null\n")


def compile_all(frames: list[bytes], workers: int, source: int, answers: int) -> None:
    """Until all have ended, or the other side says something: that it gives them up, or that it has gone."""
    waiting = list(reversed(list(enumerate(frames))))
    running: dict[int, tuple[int, int, float]] = {}  # pipe → place, process, since when
    while waiting or running:
        while waiting and len(running) < workers:
            place, frame = waiting.pop()
            pipe, process = fork(frame)
            running[pipe] = place, process, time.monotonic()
        for ready in select.select([source, *running], [], [])[0]:
            if ready == source:
                for pipe, (_, process, _) in running.items():
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    os.close(pipe)
                return
            place, process, began = running[ready]
            if not (said := os.read(ready, 1 << 16)):
                said = b"-"  # it died without a word
            os.close(ready)
            del running[ready]
            status = os.waitpid(process, 0)[1]
            error = None if said == b"+" else said[1:].decode(errors="replace") or death(status)
            line = json.dumps([place, time.monotonic() - began, error])
            write_all(answers, line.encode() + b"\n")


def fork(frame: bytes) -> tuple[int, int]:
    """A child that compiles one job and says b"+", or b"-" and why not."""
    pipe, other = os.pipe()
    parent = os.getpid()
    process = os.fork()
    if not process:
        os.close(pipe)
        compile_one(frame, other, parent)
    os.close(other)
    return pipe, process


def compile_one(frame: bytes, answer: int, parent: int) -> NoReturn:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
    # What the compiler itself prints is the better half of its complaints.
    printed = os.memfd_create("printed") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    os.dup2(printed, 2)
    said = b"+"
    try:
        job, launcher = pickle.loads(frame)
        job = pickle.loads(job)
        job.compile()
    except BaseException as error:
        said = b"-" + one_line(error).encode() + tail(printed)
    else:
        # Whether the C around the kernel compiles is for the launch to say; the kernel is there.
        with suppress(Exception):
            if launcher is not None:
                job.compile(launcher)
    os.write(answer, said[:4096])
    os._exit(0)  # no destructors: they belong to the parent


def tail(printed: int) -> bytes:
    size = os.fstat(printed).st_size
    text = os.pread(printed, 2000, max(0, size - 2000))
    return b" | " + b" ".join(text.split()) if text else b""


def death(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"the compiler died of {signal.Signals(-code).name}" if code < 0 else f"the compiler ended with code {code}"


def read_exactly(source: int, count: int) -> bytes:
    """Nothing at the end of the input."""
    found = b""
    while len(found) < count:
        chunk = os.read(source, count - len(found))
        if not chunk:
            return b""
        found += chunk
    return found


def write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # whoever prints must not print among the answers
    preload()
    gc.freeze()  # children that collect garbage would copy every page
    gc.disable()
    with suppress(BrokenPipeError):
        serve(0, answers)


if __name__ == "__main__":
    main()
