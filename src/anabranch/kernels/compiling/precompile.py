"""Compile Triton kernels in parallel processes before their first launch, into Triton's own cache on disk.

    with recording() as jobs:        # run code that launches kernels: nothing is compiled or launched
        warm_up()
    failed = precompile(jobs)        # on all cores; skips what is in the cache
    warm_up()                        # every launch finds its kernel

A `Job` is what Triton derives from one launch: kernel, signature, constants, attributes, options, target. So its key in
the cache is the one that the launch will look up. Launches that Triton would serve with one kernel are one job.

Inside `recording`, only Triton's launches are suppressed: torch's own work is done. Memory that a kernel would have
written keeps its contents, and fresh memory is zeroed, so that no index is garbage. No other thread may launch Triton
kernels in this process meanwhile. `precompile` may run in a thread while weights are read: it waits without holding the
interpreter's lock.

Other processes find kernels by module and name; one defined in `__main__` or inside a function is compiled in this
process. `precompile` raises nothing: it returns the names of kernels that did not compile and logs the reasons. Their
launch will raise, and a tuner only drops a candidate.
"""

import hashlib
import importlib
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
from triton.runtime.jit import JITCallable, JITFunction

from anabranch.kernels.compiling import compile_server
from anabranch.kernels.compiling.versions import recording_problem

log = logging.getLogger(__name__)

FEW = 3
"""Up to this number, jobs are compiled in this process rather than in one that has to import torch first."""
ENVIRONMENT = ("TRITON_", "PTXAS_", "CC")
"""Prefixes of the variables that the cache and its keys depend on; the server may have been started before they were
set."""


@dataclass(frozen=True, slots=True)
class Job:
    """One kernel in one specialisation, as Triton's launcher derives it."""

    kernel: JITFunction[Any]
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: GPUTarget

    @property
    def name(self) -> str:
        """For messages: the kernel, its constants and how it is launched."""
        names = self.kernel.arg_names
        parts = [f"{names[path[0]]}={value}" for path, value in self.constants.items() if len(path) == 1]
        parts += [f"{option}={self.options[option]}" for option in ("num_warps", "num_stages")]
        return f"{self.kernel.__name__}({', '.join(parts)})"

    def source(self) -> ASTSource:
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            return GluonASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return ASTSource(self.kernel, self.signature, self.constants, self.attributes)

    def hash(self) -> str:
        """Its key in the cache; Triton names the folder by its base 32 form."""
        backend = make_backend(self.target)
        options = backend.parse_options(dict(self.options))
        key = get_cache_key(self.source(), backend, options, env_vars=get_cache_invalidating_env_vars())
        return hashlib.sha256(key.encode()).hexdigest()

    def is_cached(self) -> bool:
        file = f"{self.kernel.__name__[:150]}.json"
        return (get_cache_manager(self.hash()).get_group(file) or {}).get(file) is not None

    def compile(self, launcher: type | None = None) -> None:
        """Compile in this process, into the cache; with `launcher` also the C code that launches the kernel."""
        source = self.source()
        compiled = triton.compile(source, target=self.target, options=self.options)
        if launcher is not None:
            launcher(source, compiled.metadata)

    def dump(self, launcher: type | None) -> bytes:
        """For `compile_jobs`."""
        buffer = io.BytesIO()
        _ByName(buffer).dump((self, launcher))
        return buffer.getvalue()


class _ByName(pickle.Pickler):
    """Pickles kernels by name: the other process has the same files."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, JITCallable):
            module, name = value.__module__, value.__qualname__
            if module == "__main__" or "<locals>" in name or find(module, name) is not value:
                raise pickle.PicklingError(f"{module}.{name} cannot be found by its name")
            return find, (module, name)
        return NotImplemented


def find(module: str, name: str) -> Any:
    """A kernel by its name, without what is wrapped around it (heuristics, an autotuner)."""
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    while not isinstance(found, JITCallable):
        found = found.fn  # type: ignore[unreachable]
    return found


@contextmanager
def recording() -> Iterator[list[Job]]:
    """Launches inside are collected, each specialisation once, instead of compiled and launched."""
    jobs: list[Job] = []
    filled: list[tuple[dict[str, Any], str]] = []
    """Entries made in Triton's tables of loaded kernels, so that each specialisation is recorded once."""
    if problem := recording_problem():
        raise RuntimeError(problem)
    run, do_compile = JITFunction.run, JITFunction._do_compile

    def run_without_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def record(
        self: Any, key: str, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> None:
        kernel_cache, _, target, *_ = self.device_caches[device]
        jobs.append(Job(self, dict(signature), dict(constexprs), dict(attrs), dict(options.__dict__), target))
        kernel_cache[key] = jobs[-1]
        filled.append((kernel_cache, key))

    JITFunction.run, JITFunction._do_compile = run_without_launch, record  # type: ignore[method-assign]
    try:
        with _zeroed():
            yield jobs
    finally:
        JITFunction.run, JITFunction._do_compile = run, do_compile  # type: ignore[method-assign]
        for kernel_cache, key in filled:
            del kernel_cache[key]


@contextmanager
def _zeroed() -> Iterator[None]:
    """Zero fresh memory: torch may use what a kernel should have filled as an index, and checks it. (A dispatch mode
    would cover every allocation, but makes torch import its compiler, which takes seconds.)"""
    names = [(torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")]
    before = [getattr(owner, name) for owner, name in names]
    for owner, name in names:
        setattr(owner, name, getattr(owner, name.replace("empty", "zeros")))
    try:
        yield
    finally:
        for (owner, name), function in zip(names, before, strict=True):
            setattr(owner, name, function)


def precompile(jobs: Sequence[Job], workers: int | None = None, deadline: float | None = None) -> list[str]:
    """Compile jobs into Triton's cache; returns the names of those that failed.

    `workers`: processes at a time (default: the cores this process may use). `deadline`: seconds that this may take.
    """
    until = None if deadline is None else time.monotonic() + deadline
    unique = {job.hash(): job for job in jobs}
    missing = [job for job in unique.values() if not job.is_cached()]
    # Start with the slowest: Gluon kernels by far, otherwise those with the longest source.
    missing.sort(key=lambda job: (job.kernel.is_gluon(), len(job.kernel.src)), reverse=True)
    times: list[float] = []
    failed: list[str] = []

    def done(job: Job, seconds: float, error: str | None) -> None:
        if error is None and not job.is_cached():
            error = "it was compiled under another key than a launch looks up"
        if error is None:
            times.append(seconds)
        else:
            failed.append(job.name)
            log.warning("%s is not compiled: %s", job.name, error)

    if not missing:
        return []
    here = missing
    if len(missing) > FEW or compile_server.running():
        here = _compile_in_parallel(missing, workers or len(os.sched_getaffinity(0)), until, done)
    for job in here:
        began = time.monotonic()
        error = None
        if until is not None and began >= until:
            error = compile_server.OUT_OF_TIME
        else:
            try:
                job.compile()
            except Exception as failure:  # any error of the compiler
                error = one_line(failure)
        done(job, time.monotonic() - began, error)
    log.info("%d kernels compiled (%.1f s of work), %d failed", len(times), sum(times), len(failed))
    return failed


def _compile_in_parallel(
    jobs: Sequence[Job], workers: int, until: float | None, done: Callable[[Job, float, str | None], None]
) -> list[Job]:
    """Returns the jobs that only this process can compile."""
    sent: list[Job] = []
    kept: list[Job] = []
    frames: list[bytes] = []
    launcher = getattr(driver.active, "launcher_cls", None)
    for job in jobs:
        try:
            frames.append(job.dump(launcher))
            sent.append(job)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            log.debug("%s is compiled in this process: %s", job.name, error)
            kept.append(job)
    left = dict(enumerate(sent))
    reason = compile_server.start().compile(
        frames,
        workers=workers,
        environment={name: value for name, value in os.environ.items() if name.startswith(ENVIRONMENT)},
        done=lambda index, seconds, error: done(left.pop(index), seconds, error),
        deadline=until,
    )
    for job in left.values():
        done(job, 0.0, reason)
    return kept


def one_line(error: BaseException) -> str:
    """The end of the compiler's message, which has the reason; the kernel's source comes before it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else '... ' + text[-300:]}"
