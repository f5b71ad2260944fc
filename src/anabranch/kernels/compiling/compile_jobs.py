"""The compiling process: `python -m anabranch.kernels.compiling.compile_jobs`, started by `compile_server`.

Receives batches of jobs, forks a child for each job, sends (index, seconds, error or None) for each that ends and None
after the last. It never opens a device. It exits when the connection is closed or after a while without batches; its
children exit with it.
"""

import gc
import importlib
import os
import pickle
import pkgutil
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import NoReturn

from anabranch.kernels.compiling.compile_server import CANCEL
from anabranch.kernels.compiling.precompile import ENVIRONMENT, one_line
from anabranch.processes import die_with

KERNELS = "anabranch.kernels.triton"
"""The package whose kernels are imported before the first job."""
IDLE_SECONDS = 300.0
"""A program that is ready needs no server; a second model would start another."""


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


def serve(client: Connection) -> None:
    while client.poll(IDLE_SECONDS):
        batch = client.recv()
        if batch is CANCEL:  # for a batch that has just ended
            continue
        frames, workers, path, environment = batch
        sys.path[:] = path
        for name in [name for name in os.environ if name.startswith(ENVIRONMENT)]:
            del os.environ[name]
        os.environ.update(environment)
        compile_all(frames, workers, client)
        client.send(None)


def compile_all(frames: list[bytes], workers: int, client: Connection) -> None:
    """Returns when all have ended, or when there is input: a cancellation, or its end."""
    waiting = list(reversed(list(enumerate(frames))))
    running: dict[Connection, tuple[int, ForkProcess, float]] = {}  # index, process, start time
    while waiting or running:
        while waiting and len(running) < workers:
            index, frame = waiting.pop()
            answer, process = start(frame)
            running[answer] = index, process, time.monotonic()
        ready = wait([client, *running])
        if client in ready:
            for _, process, _ in running.values():
                process.kill()
                process.join()
            return
        for answer in [answer for answer in running if answer in ready]:
            index, process, began = running.pop(answer)
            try:
                error = answer.recv()
                process.join()
            except EOFError:
                process.join()
                error = exit_reason(process.exitcode or 0)
            client.send((index, time.monotonic() - began, error))


def start(frame: bytes) -> tuple[Connection, ForkProcess]:
    """A child that compiles one job and sends None, or the error."""
    answer, other = Pipe(duplex=False)
    with other:
        process = get_context("fork").Process(target=compile_one, args=(frame, other, os.getpid()))
        process.start()
    return answer, process


def compile_one(frame: bytes, answer: Connection, parent: int) -> NoReturn:
    die_with(parent)
    # The compiler prints the more useful part of its errors.
    printed = os.memfd_create("printed") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
    os.dup2(printed, 2)
    error = None
    try:
        job, launcher = pickle.loads(frame)
        job.compile()
    except BaseException as failure:
        error = one_line(failure) + tail(printed)
    else:
        with suppress(Exception):  # the kernel is compiled; a launcher that does not compile fails at the launch
            if launcher is not None:
                job.compile(launcher)
    answer.send(error)
    os._exit(0)  # no destructors: they belong to the parent


def tail(printed: int) -> str:
    size = os.fstat(printed).st_size
    text = os.pread(printed, 2000, max(0, size - 2000)).decode(errors="replace")
    return f" | {' '.join(text.split())}" if text else ""


def exit_reason(code: int) -> str:
    return f"the compiler was ended by {signal.Signals(-code).name}" if code < 0 else f"the compiler exited with {code}"


def main() -> None:
    preload()
    gc.freeze()  # a garbage collection in a child would copy every page
    gc.disable()
    with suppress(EOFError, OSError), Connection(int(sys.argv[1])) as client:
        serve(client)


if __name__ == "__main__":
    main()
