"""Weights of the format `grouped` inside kernels: bytes to numbers, and where their inputs and scales are.

KIND is the kind of numbers ("": plain weights, for which nothing here is used), SPAN the inputs that are packed
together where two numbers share a byte, OUTPUTS and INPUTS those that share a scale (INPUTS 0: all).

A tile of weights is loaded as bytes. Where a byte holds two numbers, its lower half belongs to input `inputs_of(byte)`
and its upper half to the input SPAN / 2 later. Numbers are exact in every dtype that a kernel multiplies in; scales are
applied to sums in fp32. Scales of MXFP4 are powers of two: matrix products take numbers that are scaled already, which
bf16 holds as exactly, so that a step in depth may have several groups.
"""

import torch
import triton
import triton.language as tl

from anabranch.formats import PLAIN, Grouped
from anabranch.formats.grouped import STORED
from anabranch.ops.weight import Weight

VECTOR = tl.constexpr(16)
"""Bytes that a thread loads at once; they never span two groups."""


KINDS = tuple(STORED)
"""The kinds of formats that kernels with these functions multiply by."""
PLAIN_OPTIONS: dict[str, object] = {
    "scale": None,
    "zero": None,
    "KIND": "",
    "SPAN": 1,
    "OUTPUTS": 1,
    "INPUTS": 1,
    "num_groups": 1,
}


def is_supported(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether kernels multiply numbers of this dtype by the weight: in every group whole vectors of 16 bytes."""
    format = weight.format
    if format is PLAIN:
        return weight.data.dtype == dtype and weight.data.is_contiguous()
    if not isinstance(format, Grouped) or not all(tensor.is_contiguous() for tensor in weight.tensors.values()):
        return False
    inputs = weight.shape[-1]
    group = format.group or inputs
    least = 32 if format.bits == 4 else 16
    if format.numbers == "fp4" and format.scale == "uint8" and group != 32:  # see scaled_product
        return False
    return inputs % least == 0 and group % least == 0


def options(weight: Weight) -> dict[str, object]:
    """The constants and pointers of a kernel's weight."""
    format = weight.format
    if not isinstance(format, Grouped):
        return PLAIN_OPTIONS
    tensors = weight.tensors
    return {
        "scale": tensors["scale"],
        "zero": tensors.get("zero"),
        "KIND": format.numbers,
        "SPAN": format.span(weight.shape[-1]) if format.bits == 4 else 1,
        "OUTPUTS": format.rows,
        "INPUTS": format.group,
        "num_groups": format.num_groups(weight.shape[-1]),
    }


@triton.jit
def inputs_of(byte, KIND: tl.constexpr, SPAN: tl.constexpr):
    """The input of a byte, or of its lower half."""
    if KIND == "int4" or KIND == "fp4":
        return byte // (SPAN // 2) * SPAN + byte % (SPAN // 2)
    else:
        return byte


@triton.jit
def decode(data, KIND: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr):
    """The numbers of bytes, or of one half of each, in fp32; int4 is 0 to 15, minus OFFSET."""
    if KIND == "int4":
        # 2²³ + n has n in its last bits: no conversion.
        bits = (data.to(tl.int32) >> (4 * HALF)) & 15
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)
    elif KIND == "fp4":
        # A bit of sign, two of exponent and one of mantissa, at the places where fp32 has them; times 2¹²⁶.
        bits = data.to(tl.int32) >> (4 * HALF)
        return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        return data.to(tl.float32)


@triton.jit
def load_scale(scale, place, mask):
    """Scales in fp32."""
    if mask is None:
        s = tl.load(scale + place)
    else:
        s = tl.load(scale + place, mask=mask, other=0)
    if scale.dtype.element_ty == tl.uint8:
        return tl.exp2(s.to(tl.float32) - 127.0)
    else:
        return s.to(tl.float32)


@triton.jit
def load_scales(
    scales, scale, row, there, width, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, KIND: tl.constexpr,
    SPAN: tl.constexpr, INPUTS: tl.constexpr, ZERO: tl.constexpr = False,
):  # fmt: skip
    """`scales` and those of NUM_CHUNKS more tiles for `add_products`; with ZERO, zero points. `row`: where those of
    each row of weights begin. Nothing is loaded unless `there`."""
    lane = tl.arange(0, CHUNK // VECTOR) * VECTOR
    for c in tl.static_range(NUM_CHUNKS):
        inside = (there & (lane + c * CHUNK < width))[None, :]
        if INPUTS:
            group = inputs_of(lane + c * CHUNK, KIND, SPAN)[None, :] // INPUTS
        else:
            group = (lane * 0)[None, :]
        if ZERO:
            scales = scales + (tl.load(scale + row[:, None] + group, mask=inside, other=0).to(tl.float32),)
        else:
            scales = scales + (load_scale(scale, row[:, None] + group, inside),)
    return scales


@triton.jit
def add_products(
    acc, w, scales, zeros, x_row, weight, width,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, NUM_CHUNKS: tl.constexpr, KIND: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Add to acc[m, lane] the lane's share of weight · Σ_k w[m, k] · x[k].

    w[FIRST], w[FIRST + 1], ... are consecutive tiles of bytes of the same rows, of which a lane has VECTOR bytes each,
    with scales and, unless `zeros` is empty, zero points (see load_scales).
    """
    LANES: tl.constexpr = CHUNK // VECTOR
    OFFSET: tl.constexpr = 8 if KIND == "int4" and len(zeros) == 0 else 0
    d = tl.arange(0, CHUNK)
    for c in tl.static_range(NUM_CHUNKS):
        inside = (d + c * CHUNK < width)[None, :]
        # A copy of x for every row, so that it is loaded by the threads that hold the weights.
        x_ptr = x_row + inputs_of(d + c * CHUNK, KIND, SPAN)[None, :] + tl.zeros([ROWS, 1], tl.int32)
        x = tl.load(x_ptr, mask=inside, other=0.0).to(tl.float32)
        products = decode(w[FIRST + c], KIND, 0, OFFSET) * x
        if KIND == "int4" or KIND == "fp4":
            x_upper = tl.load(x_ptr + SPAN // 2, mask=inside, other=0.0).to(tl.float32)
            products += decode(w[FIRST + c], KIND, 1, OFFSET) * x_upper
            x += x_upper
        sums = tl.sum(tl.reshape(products, (ROWS, LANES, VECTOR)), 2)
        if len(zeros) > 0:
            sums -= zeros[FIRST + c] * tl.sum(tl.reshape(x, (ROWS, LANES, VECTOR)), 2)
        acc += sums * (scales[FIRST + c] * weight)
    return acc


@triton.jit
def fp8_to_bf16(data):
    """With integer instructions: a conversion instruction takes four times as long.

    A byte is moved to the upper half of 16 bits; exponent and mantissa go four places down, to where bf16 has them.
    That is the number times 2⁻¹²⁰.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, up, none;
        mov.b32 up, 0x7B807B80;
        mov.b32 none, 0x80008000;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.b32 c, a, 4;
        shr.b32 d, b, 4;
        and.b32 c, c, 0x07F007F0;
        and.b32 d, d, 0x07F007F0;
        lop3.b32 a, a, none, c, 0xEA;
        lop3.b32 b, b, none, d, 0xEA;
        fma.rn.bf16x2 $0, a, up, none;
        fma.rn.bf16x2 $1, b, up, none;
        }
        """,
        "=r,=r,r",
        [data],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


INT4_TO_BF16 = """
{
.reg .b32 n, up, one, less;
mov.b32 up, 0x43434343;
mov.b32 one, 0x3F803F80;
mov.b32 less, 0xC308C308;
shr.b32 n, $2, SHIFT;
and.b32 n, n, 0x0F0F0F0F;
prmt.b32 $0, n, up, 0x4140;
prmt.b32 $1, n, up, 0x4342;
fma.rn.bf16x2 $0, $0, one, less;
fma.rn.bf16x2 $1, $1, one, less;
}
"""
"""Halves of four bytes, minus 8: 128 + n has n in its last bits."""
FP4_TO_BF16 = """
{
.reg .b32 a, b, c, d, up, none;
mov.b32 up, 0x7E807E80;
mov.b32 none, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shl.b32 a, a, SHIFT;
shl.b32 b, b, SHIFT;
shr.b32 c, a, 6;
shr.b32 d, b, 6;
and.b32 c, c, 0x01C001C0;
and.b32 d, d, 0x01C001C0;
lop3.b32 a, a, none, c, 0xEA;
lop3.b32 b, b, none, d, 0xEA;
fma.rn.bf16x2 a, a, up, none;
fma.rn.bf16x2 b, b, up, none;
fma.rn.bf16x2 $0, a, $3, none;
fma.rn.bf16x2 $1, b, $4, none;
}
"""
"""Halves of four bytes, times scales in bf16. A number's bits are moved to where bf16 has them, times 2⁻¹²⁶."""
INT4_LOWER, INT4_UPPER = (tl.constexpr(INT4_TO_BF16.replace("SHIFT", shift)) for shift in ("0", "4"))
FP4_LOWER, FP4_UPPER = (tl.constexpr(FP4_TO_BF16.replace("SHIFT", shift)) for shift in ("4", "0"))


@triton.jit
def int4_to_bf16(data, HALF: tl.constexpr):
    """One half of each byte, minus 8."""
    ptx: tl.constexpr = INT4_UPPER if HALF else INT4_LOWER
    return tl.inline_asm_elementwise(ptx, "=&r,=&r,r", [data], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def fp4_to_bf16(data, scale, HALF: tl.constexpr):
    """One half of each byte, times a scale in bf16."""
    ptx: tl.constexpr = FP4_UPPER if HALF else FP4_LOWER
    return tl.inline_asm_elementwise(ptx, "=&r,=&r,r,r,r", [data, scale], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def fp4_operand(data, scale, HALF: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """One half of each byte, times a scale in bf16: an operand of the matrix units."""
    if dtype == tl.bfloat16 and PTX:
        return fp4_to_bf16(data, scale, HALF)
    else:
        return (decode(data, "fp4", HALF, 0) * scale.to(tl.float32)).to(dtype)


@triton.jit
def to_operand(data, zero, KIND: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """The numbers of bytes, or of one half of each, minus their zero points: an operand of the matrix units."""
    if KIND == "fp8" and dtype == tl.bfloat16 and PTX:
        return fp8_to_bf16(data)
    elif KIND == "fp8" or KIND == "int8":
        return data.to(dtype)
    elif KIND == "int4" and zero is None and dtype == tl.bfloat16 and PTX:
        return int4_to_bf16(data, HALF)
    elif KIND == "int4" and zero is not None:
        return (decode(data, KIND, HALF, 0) - zero).to(dtype)
    else:
        return decode(data, KIND, HALF, 8 if KIND == "int4" else 0).to(dtype)


@triton.jit
def dot(a, b, acc, SWAP: tl.constexpr):
    """acc + a · bᵀ, or with SWAP its transpose."""
    if SWAP:
        return tl.dot(b, tl.trans(a), acc, input_precision="ieee")
    else:
        return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def scaled_product(
    a_ptr, a_real, b_ptr, scale, zero, scale_row, zero_row, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, INPUTS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Like experts_grouped.product, with quantised b. A step of BK inputs has one scale for each row: BK divides
    INPUTS, and where numbers have 4 bits it is SPAN. Where numbers are scaled before they are multiplied, SPAN is
    INPUTS, which divides BK, and BK divides the depth."""
    PACKED: tl.constexpr = KIND == "int4" or KIND == "fp4"
    SCALED: tl.constexpr = (
        KIND == "fp4" and scale.dtype.element_ty == tl.uint8 and a_ptr.dtype.scalar.element_ty != tl.float16
    )
    STEP: tl.constexpr = BK // 2 if PACKED else BK
    HALF_SPAN: tl.constexpr = INPUTS // 2 if SCALED else STEP
    side: tl.constexpr = 1 if SWAP else 0
    d = tl.arange(0, STEP)
    a_ptr += (d // HALF_SPAN * (2 * HALF_SPAN) + d % HALF_SPAN if SCALED else d)[None, :]
    b_ptr += d[None, :]
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    nothing = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for begin in range(0, depth, BK):
        if EVEN or PACKED:
            a = tl.load(a_ptr, mask=a_real[:, None], other=0.0)
            b = tl.load(b_ptr)
        else:
            inside = (begin + d < depth)[None, :]
            a = tl.load(a_ptr, mask=a_real[:, None] & inside, other=0.0)
            b = tl.load(b_ptr, mask=inside, other=0.0)
        if PACKED:
            upper = tl.load(a_ptr + HALF_SPAN, mask=a_real[:, None], other=0.0)
        if SCALED:
            groups = begin // INPUTS + tl.arange(0, BK // INPUTS)
            # Its bits are those of an exponent; 0, which is 2⁻¹²⁷, becomes 0.
            s = (tl.load(scale + scale_row[:, None] + groups[None, :]).to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
            s = tl.broadcast_to(s[:, :, None], (BN, BK // INPUTS, HALF_SPAN)).reshape(BN, STEP)
            acc = dot(a, fp4_operand(b, s, 0, a.dtype, PTX), acc, SWAP)
            acc = dot(upper, fp4_operand(b, s, 1, a.dtype, PTX), acc, SWAP)
        else:
            z = None
            if zero is not None:
                z = tl.load(zero + zero_row + (begin // INPUTS if INPUTS else 0)).to(tl.float32)[:, None]
            part = dot(a, to_operand(b, z, KIND, 0, a.dtype, PTX), nothing, SWAP)
            if PACKED:
                part = dot(upper, to_operand(b, z, KIND, 1, a.dtype, PTX), part, SWAP)
            if INPUTS:
                acc += part * tl.expand_dims(load_scale(scale, scale_row + begin // INPUTS, None), side)
            else:
                acc += part
        a_ptr += BK
        b_ptr += STEP
    if not INPUTS:
        acc *= tl.expand_dims(load_scale(scale, scale_row, None), side)
    return acc
