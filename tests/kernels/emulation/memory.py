"""What a program has beside registers: shared memory, barriers, the copy engine and the matrix unit of a warpgroup.

Nothing asynchronous happens at once. A copy is made some time between its start and the wait for it, and until then its
destination holds NaN; a product reads shared memory some time between its start and the wait for it, and its result may
not be used before. So a kernel that waits too late, too early or not at all gives something else, or an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import language as tl

from tests.kernels.emulation import values
from tests.kernels.emulation.values import FLOATS, LAYOUT, OF_TORCH, Layout, Numbers, Pointer, Type, Value, as_value

TORCH = {dtype: torch_dtype for torch_dtype, dtype in OF_TORCH.items()}


class Barrier:
    """Of shared memory: a phase ends when `count` have arrived and all bytes that were expected have been copied."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0
        self.after_predecessor = False
        """Whether something that arrived had waited for the kernel before."""

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def arrive(self, count: int) -> None:
        assert self.count, "an arrival at a barrier that was not initialised"
        assert self.pending >= count, f"{count} arrivals where {self.pending} of {self.count} are left"
        self.pending -= count
        self.check()

    def expect(self, num_bytes: int) -> None:
        self.bytes += num_bytes
        self.arrive(1)

    def copied(self, num_bytes: int) -> None:
        self.bytes -= num_bytes
        self.check()

    def check(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1

    def passed(self, phase: int) -> bool:
        """Whether the current phase has the other parity: that is all that the hardware can tell."""
        return self.phases % 2 != phase


class Barriers:
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.all = shape, [Barrier() for _ in range(shape[0])]

    def index(self, place: Any) -> Barrier:
        return self.all[at(place, self.shape[0])]


def at(place: Any, size: int) -> int:
    where = int(place)
    if not 0 <= where < size:
        raise IndexError(f"{where} of {size} in shared memory")
    return where


class Shared(Numbers):
    """A part of shared memory. `unfenced`: what threads have written since the last fence."""

    def __init__(self, data: torch.Tensor, unfenced: torch.Tensor, dtype: tl.dtype) -> None:
        self.data, self.unfenced, self.dtype, self.layout = data, unfenced, dtype, LAYOUT

    def poison(self) -> None:
        if self.dtype == tl.float8e4nv:
            self.data.view(torch.uint8).fill_(0x7F)
        else:
            self.data.fill_(math.nan if self.dtype in FLOATS else 0x5A)

    def index(self, place: Any) -> Shared:
        where = at(place, self.shape[0])
        return Shared(self.data[where], self.unfenced[where], self.dtype)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        assert int(start) >= 0 and int(start) + int(length) <= self.shape[dim]
        where = dim, int(start), int(length)
        return Shared(self.data.narrow(*where), self.unfenced.narrow(*where), self.dtype)

    def permute(self, order: Any) -> Shared:
        return Shared(self.data.permute(tuple(order)), self.unfenced.permute(tuple(order)), self.dtype)

    def reinterpret(self, dtype: tl.dtype, shape: Any, layout: Any) -> Shared:
        assert dtype == self.dtype
        return Shared(self.data.view(tuple(shape)), self.unfenced.view(tuple(shape)), dtype)

    _reinterpret = reinterpret

    def load(self, layout: Any = None) -> Value:
        return Value(self.data.clone(), self.dtype)

    def store(self, value: Value) -> None:
        assert value.shape == self.shape, f"{value.shape} into {self.shape}"
        assert value.dtype == self.dtype, f"{value.dtype} into {self.dtype}"
        self.write(value.data)

    def write(self, data: torch.Tensor) -> None:
        """By threads."""
        self.data.copy_(data.expand(self.shape))
        self.unfenced.fill_(True)


class BarrierLayout(Layout):
    pass


@dataclass
class Descriptor:
    """A tensor for the copy engine."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any = LAYOUT

    @property
    def dtype(self) -> tl.dtype:
        return OF_TORCH[self.base.dtype]

    def read(self, place: list[int], block: torch.Tensor) -> None:
        """Beyond the tensor, zeros."""
        whole = torch.as_strided(self.base, self.shape, self.strides)
        ranges = [
            (max(first, 0), min(first + size, limit))
            for first, size, limit in zip(place, self.block_shape, self.shape, strict=True)
        ]
        block.zero_()
        if all(begin < end for begin, end in ranges):
            target = tuple(slice(begin - first, end - first) for (begin, end), first in zip(ranges, place, strict=True))
            block[target] = whole[tuple(slice(begin, end) for begin, end in ranges)]

    def watch(self, place: list[int]) -> None:
        """That a block is going to be read."""
        offset, inside = torch.zeros((), dtype=torch.int64), torch.ones((), dtype=torch.bool)
        for first, size, limit, stride in zip(place, self.block_shape, self.shape, self.strides, strict=True):
            at = torch.arange(first, first + size)
            offset = offset[..., None] + at * stride
            inside = inside[..., None] & (at >= 0) & (at < limit)
        start = Pointer.to_tensor(self.base)
        values.watch(start + Value(offset, tl.int64), Value(inside, tl.int1), False)


@dataclass(eq=False)
class Product:
    """A product of a warpgroup, which may not have been computed."""

    a: Any
    b: Shared
    acc: Any
    use_acc: bool
    result: Value | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.a.shape[0], self.b.shape[1])

    @property
    def type(self) -> Type:
        return Type(tl.float32, self.shape)

    def compute(self) -> None:
        if self.result is not None:
            return
        for operand in (self.a, self.b):
            if isinstance(operand, Shared) and operand.unfenced.any():
                raise RuntimeError("a product reads what threads wrote to shared memory, and no fence is between")
        left = self.a.data.float() @ self.b.data.float()
        acc = self.acc
        if isinstance(acc, Product):
            acc.compute()
            acc = acc.result
        self.result = Value(acc.data + left if self.use_acc else left, tl.float32)


@dataclass
class Partition:
    """Warps that run the same instructions."""

    program: Program
    num_warps: int
    products: list[Product] = field(default_factory=list)
    """Started, and not waited for."""
    copies: list[Callable[[], None]] = field(default_factory=list)
    """By threads, since the last arrival that waits for them."""
    waited: bool = False
    """For the kernel before."""


@dataclass
class Program:
    place: tuple[int, ...]
    grid: tuple[int, ...]
    events: list[Callable[[], None]] = field(default_factory=list)
    """Copies that have started."""
    unfenced: list[torch.Tensor] = field(default_factory=list)
    """Of all shared memory."""


class Operations:
    """What the language offers beside numbers. `here`: the partition that runs."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    @property
    def here(self) -> Partition:
        return self.scheduler.running

    def program_id(self, axis: int) -> Value:
        return as_value(self.here.program.place[axis])

    def num_programs(self, axis: int) -> Value:
        return as_value(self.here.program.grid[axis])

    def num_warps(self) -> int:
        return self.here.num_warps

    def wait(self, barrier: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if pred:
            wanted = int(phase)
            assert wanted in (0, 1), f"phase {wanted}"
            self.scheduler.wait_until(lambda: barrier.passed(wanted))
            self.here.waited |= barrier.after_predecessor

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.init(int(count))

    def expect(self, barrier: Barrier, num_bytes: Any, pred: Any = True) -> None:
        if pred:
            barrier.after_predecessor |= self.here.waited
            barrier.expect(int(num_bytes))

    def arrive(self, barrier: Barrier, *, count: int = 1, pred: Any = True) -> None:
        if pred:
            barrier.after_predecessor |= self.here.waited
            barrier.arrive(int(count))

    def tma_load(self, desc: Descriptor, coord: Any, barrier: Barrier, result: Shared, pred: Any = True) -> None:
        if not pred:
            return
        assert result.shape == tuple(desc.block_shape), f"{result.shape} for a block of {desc.block_shape}"
        assert result.dtype == desc.dtype, f"{desc.dtype} to {result.dtype}"
        place = [int(one) for one in coord]
        result.poison()
        desc.watch(place)

        def copy() -> None:
            desc.read(place, result.data)
            result.unfenced.fill_(False)
            barrier.copied(math.prod(desc.block_shape) * desc.base.element_size())

        self.here.program.events.append(copy)

    def thread_load(self, shared: Shared, pointer: Pointer, mask: Any = None, **_: Any) -> None:
        shared.poison()
        values.watch(pointer, mask, False)
        nothing = 0.0 if shared.dtype in FLOATS else 0

        self.here.copies.append(lambda: shared.write(values.gather(pointer, mask, nothing).data))

    def copies_arrive(self, barrier: Barrier, increment_count: bool = True) -> None:
        """Each thread arrives once its copies are made."""
        assert not increment_count, "arrivals that are counted in addition are not implemented"
        copies, threads = self.here.copies, 32 * self.here.num_warps
        barrier.after_predecessor |= self.here.waited
        self.here.copies = []

        def end() -> None:
            for copy in copies:
                copy()
            barrier.arrive(threads)

        self.here.program.events.append(end)

    def warpgroup_mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **_: Any
    ) -> Any:
        assert isinstance(b, Shared) and isinstance(a, (Shared, Value)), "operands of a warpgroup's product"
        assert a.dtype == b.dtype and a.shape[1] == b.shape[0], f"{a.dtype} {a.shape} times {b.dtype} {b.shape}"
        assert acc.shape == (a.shape[0], b.shape[1]), f"{acc.shape} for {a.shape} times {b.shape}"
        assert a.shape[0] % 64 == 0 and b.shape[1] % 8 == 0 and b.shape[1] <= 256
        product = Product(a, b, acc, bool(use_acc))
        self.here.products.append(product)
        if self.scheduler.chance():
            self.finish(0)
        if not is_async:
            return self.warpgroup_mma_wait(0, [product])
        return product

    def finish(self, outstanding: int) -> None:
        products = self.here.products
        for product in products[: len(products) - outstanding]:
            product.compute()

    def warpgroup_mma_wait(self, num_outstanding: int = 0, deps: Any = None) -> Any:
        self.finish(int(num_outstanding))
        products = self.here.products
        done = products[: max(0, len(products) - int(num_outstanding))]
        del products[: len(done)]
        # One that still runs stays a product: using its numbers is an error.
        results = tuple(one if one in products or isinstance(one, Value) else one.result for one in deps)
        return results[0] if len(results) == 1 else results

    def warp_specialize(self, functions: Any, worker_warps: Any, worker_registers: Any = None, **_: Any) -> None:
        warps = [self.here.num_warps, *worker_warps]
        assert len(functions) == len(warps), "a number of warps for each partition but the first"
        self.scheduler.run_partitions(list(zip(functions, warps, strict=True)))

    def allocate(self, dtype: tl.dtype, shape: Any, layout: Any = None, value: Any = None) -> Any:
        if dtype == tl.int64 and isinstance(layout, BarrierLayout):
            return Barriers(tuple(shape))
        data = torch.zeros(tuple(shape), dtype=TORCH[dtype])
        memory = Shared(data, torch.zeros_like(data, dtype=torch.bool), dtype)
        self.here.program.unfenced.append(memory.unfenced)
        memory.poison()
        return memory

    def fence(self, *_: Any) -> None:
        """What threads have written is there for the copy engine and the matrix unit."""
        for part in self.here.program.unfenced:
            part.fill_(False)

    def gdc_wait(self) -> None:
        self.here.waited = True

    def gdc_launch_dependents(self) -> None:
        self.scheduler.launch.early |= not self.here.waited

    def names(self) -> dict[str, Callable[..., Any]]:
        return {
            "program_id": self.program_id,
            "num_programs": self.num_programs,
            "num_warps": self.num_warps,
            "allocate_shared_memory": self.allocate,
            "warp_specialize": self.warp_specialize,
        }
