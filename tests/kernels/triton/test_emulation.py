"""What runs kernels on the CPU: it computes what a GPU would, and finds what a GPU may or may not show."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.compiling.gluon_names import barrier, tma_load
from tests.kernels.emulation.machine import Deadlock, emulated
from tests.kernels.emulation.values import Value, as_value, minimum

ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
SEEDS = range(12)


@gluon.jit
def load_blocks(a_desc, b_desc, a_ring, b_ring, full, empty, FAULT: gl.constexpr):
    STAGES: gl.constexpr = a_ring.shape[0]
    for step in range(4):
        stage = step % STAGES
        if FAULT != "overwrites":
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 2 * 64 * 64 * 2 if FAULT != "bytes" else 64 * 64 * 2 + 2)
        tma_load(a_desc, [0, step * 64], full.index(stage), a_ring.index(stage))
        tma_load(b_desc, [0, step * 64], full.index(stage), b_ring.index(stage))


@gluon.jit
def multiply_blocks(y, a_ring, b_ring, full, empty, FAULT: gl.constexpr):
    STAGES: gl.constexpr = a_ring.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout)
    for step in range(4):
        stage = step % STAGES
        if FAULT != "early":
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
        acc = warpgroup_mma(a_ring.index(stage), b_ring.index(stage).permute([1, 0]), acc, is_async=True)
        if FAULT != "frees":
            acc = warpgroup_mma_wait(0, deps=[acc])
        if FAULT != "keeps":
            mbarrier.arrive(empty.index(stage), count=1)
    if FAULT != "uses":
        acc = warpgroup_mma_wait(0, deps=[acc])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    beyond = 64 * 64 if FAULT == "beyond" else 0
    if FAULT == "uses":
        acc = warpgroup_mma(a_ring.index(0), b_ring.index(0).permute([1, 0]), acc, is_async=True)
    gl.store(y + row * 64 + column + beyond, acc * 1.0)


@gluon.jit
def multiply(y, a_desc, b_desc, STAGES: gl.constexpr, FAULT: gl.constexpr):
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], a_desc.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (multiply_blocks, (y, a_ring, b_ring, full, empty, FAULT)),
            (load_blocks, (a_desc, b_desc, a_ring, b_ring, full, empty, FAULT)),
        ],
        [1],
        [24],
    )


def run(seed: int, fault: str = "") -> bool:
    """Whether the result is right."""
    a, b = (torch.randn(64, 256, generator=torch.Generator().manual_seed(seed + i)).bfloat16() for i in (0, 100))
    y = torch.full((64, 64), math.nan)
    descriptors = [TensorDescriptor.from_tensor(x, [64, 64], ROWS) for x in (a, b)]
    with emulated(seed):
        multiply[(1,)](y, *descriptors, STAGES=2, FAULT=fault, num_warps=4)
    return bool(torch.allclose(y, a.float() @ b.float().T, rtol=1e-4, atol=1e-3))


def test_a_kernel_with_two_partitions() -> None:
    assert all(run(seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", ["overwrites", "early", "frees"])
def test_a_missing_wait_is_found(fault: str) -> None:
    """By a wrong result, an arrival too many, a copy or a wait without end, with one order of events or another."""

    def fails(seed: int) -> bool:
        try:
            return not run(seed, fault)
        except (AssertionError, Deadlock):
            return True

    assert any(fails(seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", ["keeps", "bytes"])
def test_a_wait_without_end_is_found(fault: str) -> None:
    with pytest.raises(Deadlock, match="partitions wait"):
        run(0, fault)


def test_an_address_outside_of_a_tensor_is_found() -> None:
    with pytest.raises(IndexError, match="of 4096"):
        run(0, "beyond")


def test_a_result_that_was_not_waited_for_is_found() -> None:
    with pytest.raises(TypeError, match="Product"):
        run(0, "uses")


@gluon.jit
def add_one(x, y, WAITS: gl.constexpr):
    """y = x + 1, after the kernel before, or too early."""
    place = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    if WAITS:
        gdc_wait()
    gdc_launch_dependents()
    gl.store(y + place, gl.load(x + place) + 1.0)


@pytest.mark.parametrize(
    ("kernels", "right"),
    [
        ([(0, 1, True), (1, 2, True), (2, 0, True)], True),
        ([(0, 1, True), (1, 2, False)], False),
        ([(0, 1, True), (2, 0, False)], False),
        ([(0, 1, True), (2, 3, False), (3, 4, True)], True),
        ([(0, 1, True), (2, 3, False), (1, 4, False)], False),
        ([(0, 1, True), (2, 3, True), (1, 4, False)], True),
    ],
    ids=["waits", "reads", "writes", "other memory", "what may still be written", "what was written before"],
)
def test_a_kernel_that_does_not_wait_for_its_predecessor_is_found(kernels: Any, right: bool) -> None:
    buffers = [torch.zeros(128) for _ in range(5)]
    with emulated(), nullcontext() if right else pytest.raises(RuntimeError, match="before the wait"):
        for source, target, waits in kernels:
            add_one[(1,)](buffers[source], buffers[target], WAITS=waits, num_warps=4, launch_pdl=True)


@gluon.jit
def square(x, y, FENCE: gl.constexpr):
    """x · xᵀ of numbers that threads write to shared memory."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    row = gl.arange(0, 64, gl.SliceLayout(1, blocked))[:, None]
    column = gl.arange(0, 64, gl.SliceLayout(0, blocked))[None, :]
    shared = gl.allocate_shared_memory(
        gl.bfloat16, [64, 64], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    )
    shared.store(gl.load(x + row * 64 + column))
    if FENCE:
        fence_async_shared()
    barrier()
    acc = gl.zeros([64, 64], gl.float32, layout)
    acc = warpgroup_mma(shared, shared.permute([1, 0]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    gl.store(y + row * 64 + column, gl.convert_layout(acc, blocked))


@pytest.mark.parametrize("fence", [True, False])
def test_a_missing_fence_is_found(fence: bool) -> None:
    x, y = torch.randn(64, 64).bfloat16(), torch.full((64, 64), math.nan)
    with emulated(), nullcontext() if fence else pytest.raises(RuntimeError, match="no fence"):
        square[(1,)](x, y, FENCE=fence, num_warps=4)
        assert torch.allclose(y, x.float() @ x.float().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (lambda: as_value(-7) // 2, -3),
        (lambda: as_value(-7) % 3, -1),
        (lambda: as_value((1 << 31) - 1) + 1, -(1 << 31)),
        (lambda: as_value((1 << 31) - 1).to(tl.int64) + 1, 1 << 31),
        (lambda: as_value(-1).to(tl.uint8) >> 4, 15),
        (lambda: as_value(300).to(tl.int8), 44),
        (lambda: as_value(1.0).to(tl.bfloat16) + 2.0**-9, 1.0),
        (lambda: as_value(1.0) + 2.0**-9, 1.001953125),
        (lambda: as_value(1e6).to(tl.float8e4nv).to(tl.float32), 448.0),
        (lambda: as_value(1.0).to(tl.int32, bitcast=True), 0x3F800000),
        (lambda: as_value(0x4040).to(tl.int16).to(tl.bfloat16, bitcast=True), 3.0),
        (lambda: as_value(7) / 2, 3.5),
        (lambda: minimum(as_value(math.nan), 2.0), 2.0),
        (lambda: (as_value(3) > 2) & True, True),
        (lambda: -as_value(2.5).to(tl.int32), -2),
    ],
)
def test_numbers(found: Any, wanted: Any) -> None:
    value = found()
    assert isinstance(value, Value) and value.data.item() == wanted


def test_what_is_not_there_is_named() -> None:
    @gluon.jit
    def kernel():
        gl.device_assert(True)

    with emulated(), pytest.raises(NotImplementedError, match="device_assert"):
        kernel[(1,)]()
