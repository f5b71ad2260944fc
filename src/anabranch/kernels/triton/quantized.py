"""Weights of the format `grouped` inside kernels: bytes to numbers, and where their inputs and scales are.

KIND is the kind of numbers ("" : plain weights, nothing here is used), SPAN the inputs that are packed together where two
numbers share a byte, R the outputs and GROUP the inputs that share a scale.

A tile of weights is loaded as bytes. Where a byte holds two numbers, its lower half belongs to input `inputs_of(byte)`
and its upper half to the input SPAN / 2 later. Numbers are exact in every dtype that a kernel multiplies in; scales are
applied to sums in fp32.
"""

import triton
import triton.language as tl

from anabranch.formats import PLAIN, Grouped
from anabranch.ops.weight import Weight

VECTOR = tl.constexpr(16)
"""Bytes that a thread loads at once; they never span two groups."""


def is_supported(weight: Weight) -> bool:
    """Whether kernels multiply by this weight: whole vectors in every group, and rows that begin with one."""
    format = weight.format
    if format is PLAIN:
        return True
    if not isinstance(format, Grouped):
        return False
    inputs = weight.shape[-1]
    group = format.group or inputs
    least = 32 if format.bits == 4 else 16
    return inputs % least == 0 and group % least == 0


def options(weight: Weight) -> dict[str, object]:
    """The constants and pointers of a kernel's weight."""
    format, tensors = weight.format, weight.tensors
    if not isinstance(format, Grouped):
        return {"scale": None, "zero": None, "KIND": "", "SPAN": 1, "R": 1, "GROUP": 1}
    return {
        "scale": tensors["scale"],
        "zero": tensors.get("zero"),
        "KIND": format.numbers,
        "SPAN": format.span(weight.shape[-1]),
        "R": format.rows,
        "GROUP": format.group,
    }


@triton.jit
def halves(KIND: tl.constexpr):
    """Numbers in a byte."""
    return 2 if KIND == "int4" or KIND == "fp4" else 1


@triton.jit
def inputs_of(byte, KIND: tl.constexpr, SPAN: tl.constexpr):
    """The input of a byte, or of its lower half."""
    if KIND == "int4" or KIND == "fp4":
        return byte // (SPAN // 2) * SPAN + byte % (SPAN // 2)
    else:
        return byte


@triton.jit
def decode(data, KIND: tl.constexpr, HALF: tl.constexpr):
    """The numbers of bytes, or of one half of each, in fp32; int4 as 0 to 15."""
    if KIND == "int4":
        # 2²³ + n has n in its last bits: no conversion.
        bits = (data.to(tl.int32) >> (4 * HALF)) & 15
        return (bits | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    elif KIND == "fp4":
        # One bit of sign, two of exponent, one of mantissa, at the places where fp32 has them.
        bits = data.to(tl.int32) >> (4 * HALF)
        return (((bits & 8) << 28) | ((bits & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2¹²⁶
    else:
        return data.to(tl.float32)


@triton.jit
def load_scale(scale, place, mask):
    """Scales in fp32."""
    s = tl.load(scale + place, mask=mask, other=0)
    if scale.dtype.element_ty == tl.uint8:
        return tl.exp2(s.to(tl.float32) - 127.0)
    else:
        return s.to(tl.float32)


@triton.jit
def load_zero(zero, place, mask, KIND: tl.constexpr):
    """What is subtracted from each number of a group, in fp32."""
    if zero is not None:
        return tl.load(zero + place, mask=mask, other=0).to(tl.float32)
    else:
        return 8.0 if KIND == "int4" else 0.0
