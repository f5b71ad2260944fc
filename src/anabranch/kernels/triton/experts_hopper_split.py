"""The products of experts_hopper_packed where rows of activations are in two parts (split_rows).

R rows of a tile, P parts of a stage's 128 inputs that are products of their own.

Both parts are multiplied by the matrix unit for FP8, into one sum. Weights are unpacked by far fewer instructions than
to bf16, and exactly: INT4 by 3 for 8 numbers instead of 20, MXFP4 by 7 instead of 18. Every 128 inputs, or of MXFP4 32,
are a sum of their own, which is scaled and added in fp32 on ordinary cores: sums of that matrix unit have few bits.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anabranch.kernels.compiling.gluon_names import HAS_REINTERPRET
from anabranch.kernels.triton.experts_ring import wait_for_stage

BYTES = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)


def byte_descriptor(packed: torch.Tensor, outputs: int) -> TensorDescriptor:
    """64 bytes of each output's weights."""
    return TensorDescriptor.from_tensor(packed.view(torch.uint8).flatten(0, -2), [outputs, 64], BYTES)


def split_descriptor(q_N2I: torch.Tensor, rows: int, parts: int) -> TensorDescriptor:
    """Rows in two parts: `parts` times as many inputs as share a product, of each of `rows` rows. Both parts of a row
    follow each other."""
    num, _, inner = q_N2I.shape
    width = 128 // parts
    layout = gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8, rank=3)
    shape, strides = [2 * inner // width, num, width], [width, 2 * inner, 1]
    return TensorDescriptor(q_N2I, shape, strides, [parts, rows, width], layout)


# fmt: off

@gluon.constexpr_function
def blocks(P):
    """Which thread loads which 16 bytes of [P, R, 128 / P] inputs."""
    return gl.BlockedLayout([1, 1, 16], [P, 4, 8 // P], [1, 4, 1], [2, 1, 0])


@gluon.jit
def place_of(x_ring):
    """The place of each input in its stage."""
    P: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = blocks(P)
    part = gl.arange(0, P, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    column = gl.arange(0, 128 // P, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    return gl.expand_dims(gl.expand_dims(part * (128 // P), 1), 2) + gl.expand_dims(gl.expand_dims(column, 0), 1)


@gluon.jit
def unpack_int4(data):
    """Lower and upper halves of bytes in FP8: n becomes n · 2⁻⁹, whose bits are those of n."""
    return gl.inline_asm_elementwise(
        """
        {
        shr.b32 $1, $2, 4;
        and.b32 $0, $2, 0x0F0F0F0F;
        and.b32 $1, $1, 0x0F0F0F0F;
        }
        """,
        "=&r,=&r,r", [data], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )


@gluon.jit
def unpack_fp4(data):
    """Lower and upper halves of bytes in FP8: their bits, moved to where FP8 has them, are the numbers times 2⁻⁶."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c;
        shl.b32 a, $2, 4;
        shl.b32 b, $2, 2;
        shr.b32 c, $2, 2;
        and.b32 b, b, 0x1C1C1C1C;
        and.b32 c, c, 0x1C1C1C1C;
        lop3.b32 $0, a, 0x80808080, b, 0xEA;
        lop3.b32 $1, $2, 0x80808080, c, 0xEA;
        }
        """,
        "=&r,=&r,r", [data], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )


BYTES_OF_THREADS = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
    warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 64],
))
"""Which thread has which bytes of 64 outputs with 64 bytes each."""


@gluon.jit
def load_bytes(packed, KIND: gl.constexpr):
    """64 bytes of each of 64 outputs, from shared memory: as numbers, lower halves and upper halves."""
    if KIND == "int4":
        return unpack_int4(packed.load(BYTES_OF_THREADS))
    else:
        return unpack_fp4(packed.load(BYTES_OF_THREADS))


@gluon.jit
def split_operand(low, high, R: gl.constexpr):
    """The operand of outputs whose inputs are those of `low`, then those of `high`."""
    operand: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32]), 4)
    both = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [64, 2 * low.shape[1]])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def quarters(data):
    """[64, 64] → four of [64, 16]."""
    even, odd = gl.split(gl.permute(gl.reshape(data, [64, 2, 2, 16]), [0, 3, 1, 2]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return a, b, c, d


@gluon.jit
def product(operand, x_ring, stage, part, which: gl.constexpr):
    """Both parts of R rows times an operand. `part`: the result of an earlier one; what it holds does not matter."""
    P: gl.constexpr = x_ring.shape[1]
    W: gl.constexpr = x_ring.shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=W, element_bitwidth=8, rank=2)
    if HAS_REINTERPRET:
        rows = x_ring.reinterpret(x_ring.dtype, [x_ring.shape[0] * P, x_ring.shape[2], W], layout)
    else:
        rows = x_ring._reinterpret(x_ring.dtype, [x_ring.shape[0] * P, x_ring.shape[2], W], layout)
    # The second part, whose numbers are smaller, goes first: a sum loses the bits below its largest term's.
    second, first = rows.index(2 * stage * P + P + which), rows.index(2 * stage * P + which)
    part = warpgroup_mma(operand, second.permute([1, 0]), part, use_acc=False, is_async=True)
    return warpgroup_mma(operand, first.permute([1, 0]), part, is_async=True)


@gluon.jit
def products(low, high, x_ring, stage, a0, a1, a2, a3):
    """The products of four groups of 32 inputs each."""
    R: gl.constexpr = x_ring.shape[2]
    l0, l1, l2, l3 = quarters(low)
    h0, h1, h2, h3 = quarters(high)
    a0 = product(split_operand(l0, h0, R), x_ring, stage, a0, 0)
    a1 = product(split_operand(l1, h1, R), x_ring, stage, a1, 1)
    a2 = product(split_operand(l2, h2, R), x_ring, stage, a2, 2)
    a3 = product(split_operand(l3, h3, R), x_ring, stage, a3, 3)
    return a0, a1, a2, a3


@gluon.constexpr_function
def has_scales(s_ring):
    """Whether scales come with the weights; otherwise nothing is in this part of the ring."""
    return s_ring.shape[1] > 4


@gluon.jit
def scales_of(s_ring, stage, first: gl.constexpr, layout: gl.constexpr):
    """Of a stage's 64 outputs from `first` on."""
    return s_ring.index(stage).slice(first, 64).load(gl.SliceLayout(1, layout))


@gluon.jit
def add_scaled(acc, part, s, z, t):
    """One group's products less those of the zero point, times the scale."""
    return acc + (part - z[:, None] * t[None, :]) * s[:, None]


@gluon.jit
def multiply_split_int4(ring, step, scale, zero, left, right, sums, LEFT: gl.constexpr, RIGHT: gl.constexpr,
                        DEPTH: gl.constexpr, GATHERED: gl.constexpr):
    """Like multiply, of INT4 and rows in two parts. `sums`: of each row's inputs, for every 128 of them; a number is
    its distance from the zero point, so the sum times that is taken off."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    R: gl.constexpr = x_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    first = gl.zeros([64, R], gl.float32, layout)
    second = gl.zeros([64, R], gl.float32, layout)
    a = gl.zeros([64, R], gl.float32, layout)
    b = gl.zeros([64, R], gl.float32, layout)
    RING: gl.constexpr = has_scales(s_ring)
    if not RING:
        left_scale = gl.load(scale + left).to(gl.float32)
        right_scale = gl.load(scale + right).to(gl.float32)
    for k in range(0, DEPTH, 128):
        if not RING:
            s_left, s_right = left_scale, right_scale
        z_left, z_right = load_small_point(zero, left + k // 128), load_small_point(zero, right + k // 128)
        if not RING:
            ahead = gl.minimum(k + 128, DEPTH - 128) // 128
            left_scale = gl.load(scale + left + ahead).to(gl.float32)
            right_scale = gl.load(scale + right + ahead).to(gl.float32)
        t = gl.load(sums + k // 128)
        stage = wait_for_stage(full, step, GATHERED)
        weights = w_ring.index(stage)
        if RING:
            s_left = scales_of(s_ring, stage, LEFT, layout).to(gl.float32)
            s_right = scales_of(s_ring, stage, RIGHT, layout).to(gl.float32)
        low, high = load_bytes(weights.slice(LEFT, 64, dim=0), "int4")
        a = product(split_operand(low, high, R), x_ring, stage, a, 0)
        low, high = load_bytes(weights.slice(RIGHT, 64, dim=0), "int4")
        b = product(split_operand(low, high, R), x_ring, stage, b, 0)
        a = warpgroup_mma_wait(2, deps=[a])
        first = add_scaled(first, a, s_left, z_left, t)
        b = warpgroup_mma_wait(0, deps=[b])
        mbarrier.arrive(empty.index(stage), count=1)
        second = add_scaled(second, b, s_right, z_right, t)
        step += 1
    return first, second, step


@gluon.jit
def load_small_point(zero, place):
    """Zero points, or 8, as numbers of INT4 are unpacked: times 2⁻⁹."""
    if zero is None:
        return (place * 0).to(gl.float32) + 0.015625
    else:
        return gl.load(zero + place).to(gl.float32) * 0.001953125


@gluon.jit
def power(scales, which: gl.constexpr):
    """Of one of four scales in a number: 2^(s − 127); 0 for s = 0."""
    return (((scales >> (8 * which)) & 255) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def powers(scales):
    return power(scales, 0), power(scales, 1), power(scales, 2), power(scales, 3)


@gluon.jit
def multiply_split_fp4(ring, step, LEFT: gl.constexpr, RIGHT: gl.constexpr, DEPTH: gl.constexpr,
                       GATHERED: gl.constexpr):
    """Like multiply, of MXFP4 and rows in two parts: 32 inputs, which share a scale, are one product."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    R: gl.constexpr = x_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    first = gl.zeros([64, R], gl.float32, layout)
    second = gl.zeros([64, R], gl.float32, layout)
    a0 = gl.zeros([64, R], gl.float32, layout)
    a1, a2, a3 = a0, a0, a0
    for _ in range(0, DEPTH, 128):
        stage = wait_for_stage(full, step, GATHERED)
        weights = w_ring.index(stage)
        s0, s1, s2, s3 = powers(scales_of(s_ring, stage, LEFT, layout))
        t0, t1, t2, t3 = powers(scales_of(s_ring, stage, RIGHT, layout))
        low, high = load_bytes(weights.slice(LEFT, 64, dim=0), "fp4")
        a0, a1, a2, a3 = products(low, high, x_ring, stage, a0, a1, a2, a3)
        low, high = load_bytes(weights.slice(RIGHT, 64, dim=0), "fp4")
        a0, a1, a2, a3 = warpgroup_mma_wait(0, deps=[a0, a1, a2, a3])
        first += a0 * s0[:, None]
        first += a1 * s1[:, None]
        first += a2 * s2[:, None]
        first += a3 * s3[:, None]
        a0, a1, a2, a3 = products(low, high, x_ring, stage, a0, a1, a2, a3)
        a0, a1, a2, a3 = warpgroup_mma_wait(0, deps=[a0, a1, a2, a3])
        mbarrier.arrive(empty.index(stage), count=1)
        second += a0 * t0[:, None]
        second += a1 * t1[:, None]
        second += a2 * t2[:, None]
        second += a3 * t3[:, None]
        step += 1
    return first, second, step
