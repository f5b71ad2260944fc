"""The compiling process: `python -m anabranch.kernels.compiling.compile_jobs`, started by `compile_server`.

Reads batches of jobs from standard input, forks a child for each job, writes a line of JSON for each that ends ([index,
seconds, error or null]) and null after the last. It never opens a device. It exits at the end of its input or after a
while without requests; its children exit with it.
"""

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

from anabranch.kernels.compiling.compile_server import CANCEL
from anabranch.kernels.compiling.precompile import ENVIRONMENT, one_line

KERNELS = "anabranch.kernels.triton"
"""The package whose kernels are imported before the first job."""
IDLE_SECONDS = 300.0
"""A program that is ready needs no server; a second model would start another."""
PR_SET_PDEATHSIG = 1


def preload() -> None:
    """Do once what every child would do first."""
    for module in pkgutil.iter_modules(importlib.import_module(KERNELS).__path__, f"{KERNELS}."):
        with suppress(ImportError):  # some Triton versions cannot import the Gluon kernels
            importlib.import_module(module.name)
    from triton.runtime.cache import triton_key

    triton_key()  # the hash of Triton itself, 0.3 s
    with suppress(Exception):  # without a driver this fails here, and again where it is needed
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()  # compiles C code that every program needs first


def serve(source: int, answers: int) -> None:
    while select.select([source], [], [], IDLE_SECONDS)[0]:
        head = read_exactly(source, len(CANCEL))
        if not head:
            return
        if head == CANCEL:  # for a batch that has just ended
            continue
        frames, workers, path, environment = pickle.loads(read_exactly(source, int.from_bytes(head, "little")))
        sys.path[:] = path
        for name in [name for name in os.environ if name.startswith(ENVIRONMENT)]:
            del os.environ[name]
        os.environ.update(environment)
        compile_all(frames, workers, source, answers)
        write_all(answers, b"null\n")


def compile_all(frames: list[bytes], workers: int, source: int, answers: int) -> None:
    """Returns when all have ended, or when there is input: a cancellation, or its end."""
    waiting = list(reversed(list(enumerate(frames))))
    running: dict[int, tuple[int, int, float]] = {}  # pipe → index, process, start time
    while waiting or running:
        while waiting and len(running) < workers:
            index, frame = waiting.pop()
            pipe, process = fork(frame)
            running[pipe] = index, process, time.monotonic()
        for ready in select.select([source, *running], [], [])[0]:
            if ready == source:
                for pipe, (_, process, _) in running.items():
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    os.close(pipe)
                return
            index, process, began = running.pop(ready)
            answer = os.read(ready, 1 << 16)
            os.close(ready)
            status = os.waitpid(process, 0)[1]
            error = None if answer == b"+" else answer[1:].decode(errors="replace") or exit_reason(status)
            line = json.dumps([index, time.monotonic() - began, error])
            write_all(answers, line.encode() + b"\n")


def fork(frame: bytes) -> tuple[int, int]:
    """A child that compiles one job and answers b"+", or b"-" and the error."""
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
    # The compiler prints the more useful part of its errors.
    printed = os.memfd_create("printed") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    os.dup2(printed, 2)
    result = b"+"
    try:
        job, launcher = pickle.loads(frame)
        job = pickle.loads(job)
        job.compile()
    except BaseException as error:
        result = b"-" + one_line(error).encode() + tail(printed)
    else:
        with suppress(Exception):  # the kernel is compiled; a launcher that does not compile fails at the launch
            if launcher is not None:
                job.compile(launcher)
    os.write(answer, result[:4096])
    os._exit(0)  # no destructors: they belong to the parent


def tail(printed: int) -> bytes:
    size = os.fstat(printed).st_size
    text = os.pread(printed, 2000, max(0, size - 2000))
    return b" | " + b" ".join(text.split()) if text else b""


def exit_reason(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"the compiler was ended by {signal.Signals(-code).name}" if code < 0 else f"the compiler exited with {code}"


def read_exactly(source: int, count: int) -> bytes:
    """Empty at the end of the input."""
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
    os.dup2(2, 1)  # prints must not get between the answers
    preload()
    gc.freeze()  # a garbage collection in a child would copy every page
    gc.disable()
    with suppress(BrokenPipeError):
        serve(0, answers)


if __name__ == "__main__":
    main()
