"""Weights of 4 bits from shared memory to registers, in bf16, as experts_hopper_packed multiplies them: operands of 64
outputs and 64 inputs of a stage. Threads load bytes such that no number has to change threads.

INT4: of a byte, the lower half belongs to the first 64 inputs and the upper half to the others, minus zero points.

MXFP4: a stage has four groups of 32 inputs; of a group's 16 bytes, the lower halves are the first 16 inputs and the
upper halves the others: one step of the matrix unit each. Scales are powers of two (bytes) and multiplied in.

Not here: products, and the weights in FP8 of experts_hopper_split.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
