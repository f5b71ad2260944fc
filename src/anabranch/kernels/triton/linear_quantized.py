"""Dense projections with quantised weights. T tokens, D inputs, F outputs.

Up to MULTIPLY_TOKENS tokens, weights become operands of the matrix units in registers and their scales are applied to
sums in fp32, as in experts_grouped. More tokens are limited by arithmetic: weights are dequantised into memory first,
in one pass, and the vendor's library multiplies.
"""

import math

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl

from anabranch.formats import Grouped
from anabranch.kernels.triton.launch import cdiv, launch_options, next_power_of_2, wait_for_predecessor
from anabranch.kernels.triton.quantized import decode, inputs_of, load_scale, options, scaled_product
from anabranch.ops.weight import Weight

MULTIPLY_TOKENS = 256
LEAST_PROGRAMS = 128
"""Outputs are divided among at least this many programs, as far as they suffice."""


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_scaled(
    x_TD, x_stride, weight_FD, scale, zero, bias_F, y_TF, num_tokens, D, F, num_groups,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM tokens."""
    output = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(output, F - 1).to(tl.int64)
    token = tl.program_id(1) * BM + tl.arange(0, BM)
    wait_for_predecessor(DEPENDENT)
    width = D // 2 if SPAN > 1 else D
    real = token < num_tokens
    acc = scaled_product(
        x_TD + token.to(tl.int64)[:, None] * x_stride, real, weight_FD + row[:, None] * width, scale, zero,
        row // OUTPUTS * num_groups, row * num_groups, D, BM, BN, BK, EVEN, False, KIND, INPUTS, DEPENDENT,
    )  # fmt: skip
    if bias_F is not None:
        acc += tl.load(bias_F + row).to(tl.float32)[None, :]
    mask = real[:, None] & (output < F)[None, :]
    tl.store(y_TF + token.to(tl.int64)[:, None] * F + output[None, :], acc.to(y_TF.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_rows(
    weight_FD, scale, zero, y_FD, D, num_groups,
    CHUNK: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """CHUNK bytes of one output's weights."""
    wait_for_predecessor(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    width = D // 2 if SPAN > 1 else D
    inside = byte < width
    data = tl.load(weight_FD + row * width + byte, mask=inside, other=0.0)
    d = inputs_of(byte, KIND, SPAN)
    group = d // INPUTS if INPUTS else d * 0
    s = load_scale(scale, row // OUTPUTS * num_groups + group, inside)
    z = 0.0
    if zero is not None:
        z = tl.load(zero + row * num_groups + group, mask=inside, other=0).to(tl.float32)
    elif KIND == "int4":
        z = 8.0
    y = y_FD + row * D + d
    tl.store(y, ((decode(data, KIND, 0, 0) - z) * s).to(y_FD.dtype.element_ty), mask=inside)
    if SPAN > 1:
        tl.store(y + SPAN // 2, ((decode(data, KIND, 1, 0) - z) * s).to(y_FD.dtype.element_ty), mask=inside)


def run(x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    (tokens, D), F, format = x_TD.shape, weight_FD.shape[0], weight_FD.format
    assert isinstance(format, Grouped)
    launch = launch_options(x_TD.device)
    if tokens > MULTIPLY_TOKENS:
        dense_FD = x_TD.new_empty(F, D)
        width = weight_FD.data.shape[1]
        chunk = min(1024, next_power_of_2(width))
        dequantize_rows[(F, cdiv(width, chunk))](
            weight_FD.data, y_FD=dense_FD, D=D, CHUNK=chunk, **options(weight_FD), **launch
        )
        return multiply_dense(x_TD, dense_FD, bias_F, out_dtype)
    y_TF = torch.empty(tokens, F, dtype=out_dtype, device=x_TD.device)
    if y_TF.numel() == 0:
        return y_TF
    rows = min(64, max(16, next_power_of_2(tokens)))
    columns = min(64, max(16, next_power_of_2(F // LEAST_PROGRAMS + 1) // 2))
    depth = format.span(D) if format.bits == 4 else math.gcd(128, format.group or 128)
    if x_TD.element_size() == 4 and format.bits == 8:
        depth = min(depth, 64)
    multiply_scaled[(cdiv(F, columns), cdiv(tokens, rows))](
        x_TD, x_TD.stride(0), weight_FD.data, bias_F=bias_F, y_TF=y_TF, num_tokens=tokens, D=D, F=F,
        BM=rows, BN=columns, BK=depth, EVEN=D % depth == 0, num_warps=4 if columns > 16 or rows > 16 else 2,
        num_stages=4, **options(weight_FD), **launch,
    )  # fmt: skip
    return y_TF


def multiply_dense(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if out_dtype == x_TD.dtype:
        return functional.linear(x_TD, weight_FD, bias_F)
    y_TF = torch.mm(x_TD, weight_FD.T, out_dtype=out_dtype)
    return y_TF if bias_F is None else y_TF.add_(bias_F)
