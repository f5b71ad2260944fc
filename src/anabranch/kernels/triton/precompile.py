"""Compile Triton kernels in parallel processes before they are needed, into Triton's own cache on disk.

    with recording() as jobs:        # run whatever will launch kernels: nothing is compiled, nothing is launched
        warm_up()
    failed = precompile(jobs)        # all cores; what is in the cache already costs a look
    warm_up()                        # every launch finds its kernel

A `Job` is what Triton derives from one launch: kernel, signature, constants, attributes, options, target. So its entry
in the cache is, by construction, the one that the launch will look for. Two launches that Triton would serve with one
kernel are one job. Jobs come from `recording`, or from `job_of(kernel, example arguments)`.

`recording` leaves everything alone but Triton's launches, which do nothing: torch's own work happens. What a kernel
would have written stays as it was; fresh memory is zeroed meanwhile, so that nothing indexes with garbage. Nobody else
may launch Triton kernels in this process until it is left. Weights need not be there yet: `precompile` may run in a
thread while they are read (it waits without holding the interpreter's lock).

Kernels are found again by module and name: one defined in `__main__` or inside a function cannot be compiled elsewhere
and is compiled here. Kernels that do not compile, or not in time, are named in the answer and the reasons logged:
nothing is raised, because their launch will tell, and a tuner only drops a candidate.

This file does not know models, tuning or which kernels there are.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import io
import logging
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.driver import driver
from triton.runtime.jit import JITCallable, JITFunction, MockTensor

from anabranch.kernels import compile_server

log = logging.getLogger(__name__)

FEW = 3
"""So many jobs are compiled here, one after the other, rather than starting a process that imports torch first."""
ENVIRONMENT = ("TRITON_", "PTXAS_", "CC")
"""What the cache and its keys depend on; the compiling process may have been started before it was set."""
EXPECTED = ["self", "key", "signature", "device", "constexprs", "options", "attrs", "warmup"]
"""Parameters of JITFunction._do_compile in the Tritons that `recording` was written for."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel in one specialisation, as Triton's launcher found it."""

    kernel: JITFunction[Any]
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: GPUTarget

    @property
    def name(self) -> str:
        """For people: the kernel, its constants and how it is launched."""
        names = self.kernel.arg_names
        said = [f"{names[path[0]]}={value}" for path, value in self.constants.items() if len(path) == 1]
        said += [f"num_{what}={self.options[f'num_{what}']}" for what in ("warps", "stages")]
        return f"{self.kernel.__name__}({', '.join(said)})"

    def source(self) -> ASTSource:
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            return GluonASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    def hash(self) -> str:
        """The name of its folder in the cache (before Triton spells it in base 32)."""
        backend = make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self.source(), backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()

    def is_cached(self) -> bool:
        file = f"{self.kernel.__name__[:150]}.json"
        return (get_cache_manager(self.hash()).get_group(file) or {}).get(file) is not None

    def compile(self, launcher: type | None = None) -> None:
        """Here and now, into the cache; with `launcher` also the piece of C that launches it."""
        source = self.source()
        compiled = triton.compile(source, target=self.target, options=self.options)
        if launcher is not None:
            launcher(source, compiled.metadata)

    def dump(self) -> bytes:
        buffer = io.BytesIO()
        _ByName(buffer).dump(self)
        return buffer.getvalue()


class _ByName(pickle.Pickler):
    """Kernels cross the border by name: the other side has the same files."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, JITCallable):
            module, name = value.__module__, value.__qualname__
            if module == "__main__" or "<locals>" in name or find(module, name) is not value:
                raise pickle.PicklingError(f"{module}.{name} cannot be found by its name")
            return find, (module, name)
        return NotImplemented


def find(module: str, name: str) -> Any:
    """A kernel by its name, out of what may be wrapped around it (heuristics, an autotuner)."""
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    while not isinstance(found, JITCallable):
        found = found.fn  # type: ignore[unreachable]
    return found


# -- which kernels -----------------------------------------------------------------------------------------------------


def problem() -> str | None:
    """Why launches cannot be recorded with this Triton; None if they can."""
    if list(inspect.signature(JITFunction._do_compile).parameters) == EXPECTED:
        return None
    return f"Triton {triton.__version__} compiles kernels by an interface that is not supported here"


@contextmanager
def recording() -> Iterator[list[Job]]:
    """Launches inside are collected, each specialisation once, instead of compiled and launched."""
    jobs: list[Job] = []
    kept: list[tuple[dict[str, Any], str]] = []
    """Where Triton would keep the kernels: with something there it looks no further at launches like those before."""
    if reason := problem():
        raise RuntimeError(reason)
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def run_without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def keep(
        self: Any, key: str, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> None:
        kernel_cache, _, target, *_ = self.device_caches[device]
        jobs.append(Job(self, dict(signature), dict(constexprs), dict(attrs), dict(options.__dict__), target))
        kernel_cache[key] = jobs[-1]
        kept.append((kernel_cache, key))

    JITFunction.run, JITFunction._do_compile = run_without_launch, keep  # type: ignore[method-assign]
    try:
        with _zeroed():
            yield jobs
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile  # type: ignore[method-assign]
        for kernel_cache, key in kept:
            del kernel_cache[key]


@contextmanager
def _zeroed() -> Iterator[None]:
    """Memory that a kernel was to fill may be used as an index by torch, which checks. (A dispatch mode would see all
    of it, but torch then imports its compiler first, which takes seconds.)"""
    names = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    before = [getattr(owner, name) for owner, name in names]
    for owner, name in names:
        setattr(owner, name, getattr(owner, name.replace("empty", "zeros")))
    try:
        yield
    finally:
        for (owner, name), function in zip(names, before, strict=True):
            setattr(owner, name, function)


def job_of(kernel: JITFunction[Any], *args: Any, **kwargs: Any) -> Job | None:
    """The job of a launch with such arguments: tensors or, in their place, torch dtypes (tensors aligned to 16 bytes
    are meant), numbers; constants and options by keyword. None if this process has the kernel already."""
    with recording() as jobs:
        kernel.run(*(MockTensor.wrap_dtype(arg) for arg in args), grid=(1,), warmup=True, **kwargs)
    return jobs[0] if jobs else None


# -- compiling ---------------------------------------------------------------------------------------------------------


def precompile(
    jobs: Sequence[Job],
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    deadline: float | None = None,
) -> list[str]:
    """Bring jobs into Triton's cache; the names of those that did not get there.

    `workers` processes at a time (default: every core this process may use). `progress(done, total)` counts those that
    are not there yet. `deadline`: seconds that this may take.
    """
    until = None if deadline is None else time.monotonic() + deadline
    unique = {job.hash(): job for job in jobs}
    missing = [job for job in unique.values() if not job.is_cached()]
    # The longest should not be the last to begin. Gluon's are by far the longest, else the length of the text tells.
    missing.sort(key=lambda job: (job.kernel.is_gluon(), len(job.kernel.src)), reverse=True)
    batch = Batch(missing, progress)
    if len(missing) <= FEW and not compile_server.running():
        batch.compile_here(missing, until)
    elif missing:
        batch.compile_in_parallel(workers or len(os.sched_getaffinity(0)), until)
    if missing:
        took = sum(batch.seconds)
        log.info("%d kernels compiled (%.1f s of work), %d failed", len(batch.seconds), took, len(batch.failed))
    return batch.failed


class Batch:
    """Jobs on their way, and what became of them."""

    def __init__(self, jobs: list[Job], progress: Callable[[int, int], None] | None) -> None:
        self.jobs = jobs
        self.progress = progress
        self.num_done = 0
        self.seconds: list[float] = []
        self.failed: list[str] = []

    def done(self, job: Job, seconds: float, error: str | None) -> None:
        self.num_done += 1
        if error is None and not job.is_cached():
            error = "it was compiled under another name than a launch here would look for"
        if error is None:
            self.seconds.append(seconds)
        else:
            self.failed.append(job.name)
            log.warning("%s is not compiled: %s", job.name, error)
        if self.progress is not None:
            self.progress(self.num_done, len(self.jobs))

    def compile_here(self, jobs: Sequence[Job], until: float | None) -> None:
        for job in jobs:
            began = time.monotonic()
            error = None
            if until is not None and began >= until:
                error = "there was no more time"
            else:
                try:
                    job.compile()
                except Exception as failure:  # whatever the compiler has to say about a kernel
                    error = one_line(failure)
            self.done(job, time.monotonic() - began, error)

    def compile_in_parallel(self, workers: int, until: float | None) -> None:
        sent: list[Job] = []
        kept: list[Job] = []
        frames: list[bytes] = []
        launcher = getattr(driver.active, "launcher_cls", None)
        for job in self.jobs:
            try:
                frames.append(pickle.dumps((job.dump(), launcher)))
                sent.append(job)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                log.debug("%s is compiled here: %s", job.name, error)
                kept.append(job)
        left = dict(enumerate(sent))

        def done(place: int, seconds: float, error: str | None) -> None:
            self.done(left.pop(place), seconds, error)

        environment = {name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)}
        reason = compile_server.start().compile(
            frames, workers=workers, environment=environment, done=done, deadline=until
        )
        for job in left.values():
            self.done(job, 0.0, reason)
        self.compile_here(kept, until)


def one_line(error: BaseException) -> str:
    """The end of what the compiler says is the reason; before it stands the kernel's text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else '... ' + text[-300:]}"
