"""The products of experts_hopper_packed where activations are bf16: weights of 4 bits go from shared memory to
registers, as operands in bf16 of 64 outputs and 64 inputs of a stage. Threads load bytes such that no number has to
change threads.

INT4: of a byte, the lower half belongs to the first 64 inputs and the upper half to the others, minus zero points.

MXFP4: a stage has four groups of 32 inputs; of a group's 16 bytes, the lower halves are the first 16 inputs and the
upper halves the others: one step of the matrix unit each. Scales are powers of two (bytes) and multiplied in.

Not here: rows in two parts, and weights in FP8: see experts_hopper_split.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from anabranch.kernels.triton.experts_ring import wait_for_stage

# fmt: off

GROUPS = gl.constexpr(gl.DistributedLinearLayout(
    reg_bases=[[0, 1, 0], [0, 0, 4], [8, 0, 0]], lane_bases=[[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
    warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 2, 8],
))
"""Which thread has which bytes of MXFP4: of 64 outputs two groups, eight times two bytes each."""
OUTPUTS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, GROUPS.value)))
"""And which thread has the scales of these outputs."""


@gluon.jit
def unpack(packed, zero):
    """Of two bytes: both lower halves and both upper halves, minus zero, in bf16. A number n in the last bits of 128 is
    128 + n; `zero` is 128 more than the zero point."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, z, some, one;
        mov.b32 some, 0x000F000F;
        mov.b32 one, 0x43004300;
        cvt.u32.u16 a, $4;
        mov.b32 z, {$5, $5};
        prmt.b32 a, a, 0, 0x4140;
        shr.b32 b, a, 4;
        lop3.b32 a, a, some, one, 0xEA;
        lop3.b32 b, b, some, one, 0xEA;
        sub.bf16x2 a, a, z;
        sub.bf16x2 b, b, z;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }
        """,
        "=h,=h,=h,=h,h,h", [packed, zero],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )


@gluon.jit
def operands(packed, zero, R: gl.constexpr):
    """Two operands of 64 outputs and 64 inputs each, from 64 x 64 bytes in shared memory; a zero for each output."""
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [8, 0], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]], block_bases=[],
        shape=[64, 32],
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16]), 2)
    a, b, c, d = unpack(packed.load(pairs), gl.convert_layout(zero, gl.SliceLayout(1, pairs))[:, None])
    low = gl.reshape(gl.join(a, b), [64, 64])
    high = gl.reshape(gl.join(c, d), [64, 64])
    return gl.convert_layout(low, operand, assert_trivial=True), gl.convert_layout(high, operand, assert_trivial=True)


@gluon.jit
def load_point(zero, place):
    """128 more than zero points, or than 8, in bf16."""
    if zero is None:
        return (place * 0 + 136).to(gl.bfloat16)
    else:
        return (gl.load(zero + place).to(gl.int32) + 128).to(gl.bfloat16)


@gluon.jit
def unpack_scaled(packed, scale):
    """Of two bytes of MXFP4: both lower halves and both upper halves, times scale · 2⁻⁶⁴, in bf16.

    A number's bits, moved to where bf16 has them (the sign apart from the others: one factor for both moves), are the
    number times 2⁻¹²⁶. `scale`: twice 2¹²⁶⁻⁶⁴ times the scale in bf16, see factors.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s;
        mov.b32 s, {$5, $5};
        cvt.u32.u16 a, $4;
        prmt.b32 a, a, 0, 0x4140;
        and.b32 b, a, 0x00F000F0;
        and.b32 a, a, 0x000F000F;
        mul.lo.u32 b, b, 0x0104;
        mul.lo.u32 a, a, 0x1040;
        and.b32 b, b, 0x81C081C0;
        and.b32 a, a, 0x81C081C0;
        mul.bf16x2 a, a, s;
        mul.bf16x2 b, b, s;
        mov.b32 {$0, $1}, a;
        mov.b32 {$2, $3}, b;
        }
        """,
        "=h,=h,=h,=h,h,h", [packed, scale],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
    )


@gluon.jit
def factors(scale):
    """Of two scales, 2^(s − 127) for a byte s: each times 2¹²⁶⁻⁶⁴ in bf16. From s = 193 on they are infinite."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, more;
        mov.b32 more, 0x5E805E80;
        prmt.b32 a, $2, 0, 0x4140;
        mul.lo.u32 a, a, 128;
        mul.bf16x2 a, a, more;
        mov.b32 {$0, $1}, a;
        }
        """,
        "=h,=h,r", [scale], dtype=(gl.bfloat16, gl.bfloat16), is_pure=False, pack=1,
    )


@gluon.jit
def scaled_operand(data, scale, R: gl.constexpr):
    """The operand of 64 outputs and 64 inputs: 32 bytes and two scales of each output."""
    operand: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16]), 2)
    first, second = scale
    factor = gl.convert_layout(gl.join(first, second), gl.SliceLayout(2, GROUPS), assert_trivial=True)
    data = gl.convert_layout(gl.reshape(data, [64, 2, 8]), GROUPS, assert_trivial=True)
    a, b, c, d = unpack_scaled(data, gl.expand_dims(factor, 2))
    # output, group, two bytes, byte, half → output, group, half, two bytes, byte
    numbers = gl.permute(gl.join(gl.join(a, b), gl.join(c, d)), [0, 1, 4, 2, 3])
    return gl.convert_layout(gl.reshape(numbers, [64, 64]), operand, assert_trivial=True)


@gluon.jit
def load_halves(packed):
    """The bytes of the first 64 inputs and of the last 64, from 64 x 64 bytes in shared memory, two in a number."""
    pairs: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 8], [0, 4], [8, 0], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]], block_bases=[],
        shape=[64, 32],
    )
    return gl.split(gl.permute(gl.reshape(packed.load(pairs), [64, 2, 16]), [0, 2, 1]))


@gluon.jit
def load_scales(scale, row, k, DEPTH: gl.constexpr):
    """Of 64 inputs from k on and of the 64 after them, two in a number; those beyond the last input repeat others."""
    last: gl.constexpr = DEPTH // 64 - 1
    low, high = gl.minimum(k // 64, last), gl.minimum(k // 64 + 1, last)
    return gl.inline_asm_elementwise(
        "ld.global.u16 $0, [$2]; ld.global.u16 $1, [$3];", "=&r,=&r,l,l", [scale + row + low, scale + row + high],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )


@gluon.jit
def multiply_parts(ring, step, scale, zero, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr,
                   DEPTH: gl.constexpr, GATHERED: gl.constexpr):
    """Like multiply, of INT4. `left` and `right`: where the scales of each output begin; they are loaded one step
    ahead."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    R: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    first = gl.zeros([64, R], gl.float32, layout)
    second = gl.zeros([64, R], gl.float32, layout)
    part = gl.zeros([64, R], gl.float32, layout)
    left_scale = gl.load(scale + left).to(gl.float32)
    right_scale = gl.load(scale + right).to(gl.float32)
    left_zero = load_point(zero, left)
    right_zero = load_point(zero, right)
    for k in range(0, DEPTH, 128):
        s_left, s_right, z_left, z_right = left_scale, right_scale, left_zero, right_zero
        ahead = gl.minimum(k + 128, DEPTH - 128) // 128
        left_scale = gl.load(scale + left + ahead).to(gl.float32)
        right_scale = gl.load(scale + right + ahead).to(gl.float32)
        left_zero = load_point(zero, left + ahead)
        right_zero = load_point(zero, right + ahead)
        stage = wait_for_stage(full, step, GATHERED)
        weights = w_ring.index(stage)
        x_low = x_ring.index(2 * stage).permute([1, 0])
        x_high = x_ring.index(2 * stage + 1).permute([1, 0])
        low, high = operands(weights.slice(LEFT, 64, dim=0), z_left, R)
        part = warpgroup_mma(low, x_low, part, use_acc=False, is_async=True)
        part = warpgroup_mma(high, x_high, part, is_async=True)
        low, high = operands(weights.slice(RIGHT, 64, dim=0), z_right, R)
        part = warpgroup_mma_wait(0, deps=[part])
        first += part * s_left[:, None]
        part = warpgroup_mma(low, x_low, part, use_acc=False, is_async=True)
        part = warpgroup_mma(high, x_high, part, is_async=True)
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(empty.index(stage), count=1)
        second += part * s_right[:, None]
        step += 1
    return first, second, step


@gluon.jit
def multiply_scaled(ring, step, scale, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr,
                    DEPTH: gl.constexpr, GATHERED: gl.constexpr):
    """Like multiply, of MXFP4. Weights of the second 64 outputs are unpacked while the first 64 are multiplied. No
    product may run while the loop begins again: the assembler would then wait for each one."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    R: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 16])
    first = gl.zeros([64, R], gl.float32, layout)
    second = gl.zeros([64, R], gl.float32, layout)
    left_low, left_high = load_scales(scale, left, 0, DEPTH)
    right_low, right_high = load_scales(scale, right, 0, DEPTH)
    for k in range(0, DEPTH, 128):
        s_left_low, s_left_high = factors(left_low), factors(left_high)
        s_right_low, s_right_high = factors(right_low), factors(right_high)
        left_low, left_high = load_scales(scale, left, k + 128, DEPTH)
        right_low, right_high = load_scales(scale, right, k + 128, DEPTH)
        stage = wait_for_stage(full, step, GATHERED)
        weights = w_ring.index(stage)
        x_low = x_ring.index(2 * stage).permute([1, 0])
        x_high = x_ring.index(2 * stage + 1).permute([1, 0])
        low, high = load_halves(weights.slice(LEFT, 64, dim=0))
        first = warpgroup_mma(scaled_operand(low, s_left_low, R), x_low, first, is_async=True)
        first = warpgroup_mma(scaled_operand(high, s_left_high, R), x_high, first, is_async=True)
        low, high = load_halves(weights.slice(RIGHT, 64, dim=0))
        second = warpgroup_mma(scaled_operand(low, s_right_low, R), x_low, second, is_async=True)
        if R > 64:  # for want of registers
            first, second = warpgroup_mma_wait(1, deps=[first, second])
        second = warpgroup_mma(scaled_operand(high, s_right_high, R), x_high, second, is_async=True)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return first, second, step
