"""Runs kernels written in Gluon or Triton on the CPU, as the Python functions that they are.

with emulated(seed=0):
    kernel[grid](tensor, ...)

Programs run one after another in a random order. The partitions of a program take turns in a random order, at barriers
only; a copy is made or a product computed at a random moment that the hardware allows. So a missing wait is found by
one seed or another, a wait that never ends at once, and so is an address outside of a tensor's memory.

A kernel that is launched before its predecessor has ended may, before it waits for that, neither read what the
predecessor writes nor write what it reads or writes. What threads write to shared memory may be multiplied after a
fence only.

What it does not see: layouts and registers (a compilation does), and races of the threads of one partition.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import torch
from triton import language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.language.extra import cuda, libdevice
from triton.runtime.jit import JITFunction

from anabranch.kernels.compiling import gluon_names
from tests.kernels.emulation import assembly, values
from tests.kernels.emulation.memory import BarrierLayout, Descriptor, Operations, Partition, Program
from tests.kernels.emulation.values import LAYOUT, Pointer, as_value

OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg", "enable_fp_fusion", "num_ctas")
KEPT = 16
"""Launches whose accesses are known: more than ever overlap."""
LAYOUTS = (
    "BlockedLayout", "SliceLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout",
    "NVMMASharedLayout", "SwizzledSharedLayout", "AutoLayout", "CoalescedLayout",
)  # fmt: skip


class Deadlock(RuntimeError):
    pass


class Accesses:
    """Which bytes of which memory."""

    def __init__(self) -> None:
        self.bytes: dict[int, torch.Tensor] = {}
        self.kept: list[torch.Tensor] = []

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        key = memory.untyped_storage().data_ptr()
        if key not in self.bytes:
            self.bytes[key] = torch.zeros(memory.untyped_storage().nbytes(), dtype=torch.bool)
            self.kept.append(memory)  # else other memory might get its address
        return self.bytes[key]


@dataclass
class Launch:
    """Of a kernel. `overlaps`: it may start before its predecessor has ended."""

    kernel: str
    overlaps: bool
    early: bool = False
    """It lets the next one start before it has waited itself."""
    read: Accesses = field(default_factory=Accesses)
    written: Accesses = field(default_factory=Accesses)

    def forget(self) -> None:
        """It has ended by now, whatever overlaps."""
        self.read, self.written = Accesses(), Accesses()


class Ended(BaseException):
    """Ends a partition when another one has failed."""


class Turn(threading.Thread):
    """A partition's thread; it runs while it has its turn."""

    def __init__(self, scheduler: Scheduler, partition: Partition, body: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self.scheduler, self.partition, self.body = scheduler, partition, body
        self.mine, self.ended = threading.Semaphore(0), False
        self.blocked: Callable[[], bool] | None = None

    def run(self) -> None:
        self.mine.acquire()
        try:
            if not self.scheduler.failures:
                with torch.inference_mode():  # as the engine has it; it belongs to a thread
                    self.body()
        except Ended:
            pass
        except BaseException as error:  # any: it is raised again where the kernel was launched
            self.scheduler.failures.append(error)
        self.ended = True
        self.scheduler.turn_over.release()

    def pause(self, until: Callable[[], bool]) -> None:
        self.blocked = until
        self.scheduler.turn_over.release()
        self.mine.acquire()
        if self.scheduler.failures:
            raise Ended


class Scheduler:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turn_over = threading.Semaphore(0)
        self.failures: list[BaseException] = []
        self.turn: Turn | None = None
        """Whose it is, where a program has several partitions."""
        self.running: Partition
        self.launches: list[Launch] = []

    @property
    def launch(self) -> Launch:
        return self.launches[-1]

    def before(self) -> Iterator[Launch]:
        """Launches that may not have ended."""
        for launch, earlier in zip(self.launches[::-1], self.launches[-2::-1]):
            if not launch.overlaps or (launch is not self.launch and not launch.early):
                return
            yield earlier

    def watch(self, pointer: Pointer, mask: Any, writes: bool) -> None:
        offset, real, _ = pointer.places(mask)
        place = offset[real] * pointer.memory.element_size()
        if not self.running.waited:
            for launch in self.before():
                touched = launch.written.of(pointer.memory)[place]
                if writes:
                    touched = touched | launch.read.of(pointer.memory)[place]
                if touched.any():
                    raise RuntimeError("memory of the kernel before is used before the wait for that kernel")
        (self.launch.written if writes else self.launch.read).of(pointer.memory)[place] = True

    def chance(self) -> bool:
        return self.random.random() < 0.5

    def wait_until(self, condition: Callable[[], bool]) -> None:
        if self.turn is not None:
            if not condition() or self.chance():
                self.turn.pause(condition)
            return
        while not condition():
            self.let_happen(self.running.program, [])

    def let_happen(self, program: Program, ready: list[Turn]) -> None:
        """One of these turns, or a copy that has started."""
        if not ready and not program.events:
            raise Deadlock("all partitions wait for a barrier that will not change")
        choice: Any = self.random.choice([*ready, *program.events])
        if isinstance(choice, Turn):
            self.give(choice)
        else:
            program.events.remove(choice)
            choice()

    def run_partitions(self, parts: list[tuple[tuple[Callable[..., None], tuple[Any, ...]], int]]) -> None:
        """All of them, to their ends."""
        parent = self.running
        turns = []
        for (function, args), warps in parts:
            partition = Partition(parent.program, warps, waited=parent.waited)
            turns.append(Turn(self, partition, lambda function=function, args=args: function(*args)))
        for turn in turns:
            turn.start()
        try:
            while not self.failures and (alive := [turn for turn in turns if not turn.ended]):
                ready = [turn for turn in alive if turn.blocked is None or turn.blocked()]
                self.let_happen(parent.program, ready)
        except Exception as error:
            self.failures.append(error)
        for turn in turns:  # after a failure
            while not turn.ended:
                self.give(turn)
        self.turn, self.running = None, parent
        if self.failures:
            raise self.failures[0]

    def give(self, turn: Turn) -> None:
        turn.blocked, self.turn, self.running = None, turn, turn.partition
        turn.mine.release()
        self.turn_over.acquire()

    def run_program(self, program: Program, num_warps: int, body: Callable[[], None]) -> None:
        self.running = Partition(program, num_warps, waited=not self.launch.overlaps)
        body()
        while program.events:  # what nothing has waited for
            self.let_happen(program, [])


class Names:
    """What the names in kernels stand for here."""

    def __init__(self, scheduler: Scheduler) -> None:
        operations = Operations(scheduler)
        self.meaning: dict[int, Any] = {}
        self.globals: dict[int, dict[str, Any]] = {}
        self.functions: dict[int, Callable[..., Any]] = {}
        for name, function in (values.NAMES | assembly.NAMES | operations.names()).items():
            for module in (tl, gl, libdevice):
                if (original := getattr(module, name, None)) is not None:
                    self.meaning[id(original)] = function
        for name in LAYOUTS:
            if (original := getattr(gl, name, None)) is not None:
                self.meaning[id(original)] = LAYOUT
        nothing = lambda *args, **kwargs: None  # noqa: E731
        for original, function in (
            (hopper.mbarrier.init, operations.init),
            (hopper.mbarrier.expect, operations.expect),
            (hopper.mbarrier.wait, operations.wait),
            (hopper.mbarrier.arrive, operations.arrive),
            (hopper.mbarrier.MBarrierLayout, BarrierLayout),
            (gluon_names.tma_load, operations.tma_load),
            (gluon_names.thread_load, operations.thread_load),
            (gluon_names.barrier, nothing),
            (tl.debug_barrier, nothing),
            (hopper.fence_async_shared, operations.fence),
            (ampere.async_copy.mbarrier_arrive, operations.copies_arrive),
            (ampere.mma_v2, values.mma_v2),
            (hopper.warpgroup_mma, operations.warpgroup_mma),
            (hopper.warpgroup_mma_wait, operations.warpgroup_mma_wait),
            (cuda.gdc_wait, operations.gdc_wait),
            (cuda.gdc_launch_dependents, operations.gdc_launch_dependents),
        ):
            self.meaning[id(original)] = function

    def of(self, thing: Any) -> Any:
        if id(thing) in self.meaning:
            return self.meaning[id(thing)]
        if isinstance(thing, tl.constexpr):
            return self.of(thing.value)
        if isinstance(thing, JITFunction):
            return self.function(thing)
        if isinstance(thing, ModuleType):
            return Module(self, thing)
        if getattr(thing, "__triton_builtin__", False):
            return missing(thing)
        return thing

    def function(self, jitted: JITFunction) -> Callable[..., Any]:
        if id(jitted) not in self.functions:
            original = jitted.fn
            made = FunctionType(original.__code__, self.of_module(original.__globals__), original.__name__)
            made.__defaults__, made.__kwdefaults__ = original.__defaults__, original.__kwdefaults__
            self.functions[id(jitted)] = with_tensors(made)
        return self.functions[id(jitted)]

    def of_module(self, names: dict[str, Any]) -> dict[str, Any]:
        if id(names) not in self.globals:
            found: dict[str, Any] = {}
            self.globals[id(names)] = found  # before its functions, which may call each other
            found.update({name: self.of(thing) for name, thing in names.items() if not name.startswith("__")})
            found["range"] = values.loop
        return self.globals[id(names)]


class Module:
    def __init__(self, names: Names, original: ModuleType) -> None:
        self.names, self.original = names, original

    def __getattr__(self, name: str) -> Any:
        return self.names.of(getattr(self.original, name))


def with_tensors(function: FunctionType) -> Callable[..., Any]:
    """Constants that are given to it are tensors where it uses them as such."""

    def call(*args: Any, **kwargs: Any) -> Any:
        made = [as_value(arg) if type(arg) is float else arg for arg in args]
        return function(*made, **kwargs)

    return call


def missing(builtin: Any) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{builtin.__name__} is not in tests/kernels/emulation")

    return refuse


def argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(value)
    if hasattr(value, "block_shape"):
        return Descriptor(value.base, list(value.shape), list(value.strides), list(value.block_shape))
    if isinstance(value, (bool, int, float)):
        return as_value(value)
    assert value is None, f"{type(value).__name__} as a kernel's argument"
    return None


@contextmanager
def emulated(seed: int = 0) -> Iterator[list[Launch]]:
    """Launches of kernels run here, and are listed."""
    scheduler = Scheduler(seed)
    names = Names(scheduler)

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        given = dict(zip(self.arg_names, args)) | kwargs
        made = [
            given.get(param.name, param.default) if param.is_constexpr else argument(given[param.name])
            for param in self.params
        ]
        unknown = given.keys() - set(self.arg_names) - set(OPTIONS)
        assert not unknown, f"{self.__name__} has no {', '.join(sorted(unknown))}"
        shape = tuple(grid(given) if callable(grid) else grid)
        shape = (*shape, 1, 1)[:3]
        places = list(itertools.product(*(range(size) for size in shape)))
        scheduler.random.shuffle(places)
        function = names.function(self)
        overlaps = bool(kwargs.get("launch_pdl")) and len(scheduler.launches) > 0
        scheduler.launches.append(Launch(self.__name__, overlaps))
        if len(scheduler.launches) > KEPT:
            scheduler.launches[-KEPT - 1].forget()
        for place in places:
            program = Program(place, shape)
            scheduler.run_program(program, kwargs.get("num_warps", 4), lambda: function(*made))

    before = JITFunction.run
    JITFunction.run, values.watch = run, scheduler.watch
    try:
        yield scheduler.launches
    finally:
        JITFunction.run, values.watch = before, values.no_watch
