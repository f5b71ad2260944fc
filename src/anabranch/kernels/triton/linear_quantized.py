"""Dense projections with quantised weights. T tokens, D inputs, F outputs.

A few tokens: `stream_scaled`. More in block FP8 on Hopper: x is quantised too, and linear_hopper_fp8 or the vendor's
library multiplies. INT4 on Hopper: linear_hopper_packed. Others, up to MULTIPLY_TOKENS: weights become operands of the
matrix units in registers and their scales are applied to sums in fp32, as in experts_grouped; above, weights are
dequantised into memory first, in one pass, and the vendor's library multiplies.
"""

import functools
import logging
import math
from collections.abc import Callable

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl

from anabranch.formats import Grouped
from anabranch.kernels.triton.launch import (
    cdiv,
    gluon_kernels,
    is_hopper,
    launch_options,
    machine_of,
    next_power_of_2,
    wait_for_predecessor,
)
from anabranch.kernels.triton.quantize_rows import FEW_TOKENS, GROUP, quantize_rows
from anabranch.kernels.triton.quantized import VECTOR, decode, inputs_of, load_scale, options, scaled_product
from anabranch.kernels.triton.stream import add_to, load_inside, store_sums
from anabranch.ops.weight import Weight

log = logging.getLogger(__name__)
hopper_kernels = functools.partial(gluon_kernels, "linear_hopper_fp8")
packed_kernels = functools.partial(gluon_kernels, "linear_hopper_packed")

Product = Callable[[torch.Tensor, Weight, torch.Tensor | None, torch.dtype], torch.Tensor]
LIBRARY_TOKENS = 64
"""Above, where linear_hopper_fp8 does not multiply, the vendor's library does."""
MULTIPLY_TOKENS = {4: 32, 8: 64}
"""By bits of a weight. On an H200, INT4 is faster dequantised at 64 tokens and 8 bits at 96, not at 64."""
MAX_LOADS = 8
"""16-byte loads of weights that a thread of `stream_scaled` may have under way for each output."""
NUM_LANES = 64 if torch.version.hip else 32
LEAST_PROGRAMS = 128
"""Outputs are divided among at least this many programs, as far as they suffice."""


@triton.jit
def stream_scaled(
    x_TD, x_stride, weight_FD, scale, zero, bias_F, y_TF, num_outputs, num_groups,
    T: tl.constexpr, WIDTH: tl.constexpr, R: tl.constexpr, W: tl.constexpr, L: tl.constexpr, LOG: tl.constexpr,
    KIND: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Like linear.stream_rows, for rows of WIDTH bytes: weights and scales are loaded before the wait."""
    STEP: tl.constexpr = L * VECTOR
    CHUNKS: tl.constexpr = (WIDTH + STEP - 1) // STEP
    OFFSET: tl.constexpr = 8 if KIND == "int4" and zero is None else 0
    first = tl.program_id(0) * (R * W)
    output_W = first + tl.arange(0, W)
    d = tl.arange(0, STEP)[None, :]
    lane = tl.arange(0, L)[None, :] * VECTOR  # its first byte
    w = ()
    s = ()
    z = ()
    bias = ()
    for c in tl.static_range(CHUNKS):
        for r in tl.static_range(R):
            row_W = tl.minimum(output_W + r * W, num_outputs - 1).to(tl.int64)[:, None]
            w = w + (load_inside(weight_FD + row_W * WIDTH, d, c, STEP, WIDTH, "evict_first"),)
    for c in tl.static_range(CHUNKS):
        there = c * STEP + lane < WIDTH
        group = inputs_of(c * STEP + lane, KIND, SPAN) // INPUTS if INPUTS else lane * 0
        for r in tl.static_range(R):
            row_W = tl.minimum(output_W + r * W, num_outputs - 1).to(tl.int64)[:, None]
            s = s + (load_scale(scale, row_W // OUTPUTS * num_groups + group, there),)
            if zero is not None:
                z = z + (tl.load(zero + row_W * num_groups + group, mask=there, other=0).to(tl.float32),)
    if bias_F is not None:
        for r in tl.static_range(R):
            bias = bias + (tl.load(bias_F + tl.minimum(output_W + r * W, num_outputs - 1)).to(tl.float32),)
    # All loads are to be under way before the first is used; the assembler would save registers instead.
    tl.debug_barrier()
    wait_for_predecessor(DEPENDENT)
    # A copy of x for each warp: it arrives in the registers where the weights are.
    x_W = x_TD + tl.zeros((W, 1), tl.int32)
    sums = ()
    for _ in tl.static_range(T * R):
        sums = sums + (tl.zeros((W, L), tl.float32),)
    for c in tl.static_range(CHUNKS):
        inside = c * STEP + d < WIDTH
        x_c = x_W + inputs_of(c * STEP + d, KIND, SPAN)
        for t in tl.static_range(T):
            x = tl.load(x_c + t * x_stride, mask=inside, other=0.0).to(tl.float32)
            upper = x
            if SPAN > 1:
                upper = tl.load(x_c + (t * x_stride + SPAN // 2), mask=inside, other=0.0).to(tl.float32)
            for r in tl.static_range(R):
                products = decode(w[c * R + r], KIND, 0, OFFSET) * x
                if SPAN > 1:
                    products += decode(w[c * R + r], KIND, 1, OFFSET) * upper
                part = tl.sum(tl.reshape(products, (W, L, VECTOR)), 2)
                if zero is not None:
                    inputs = x + upper if SPAN > 1 else x
                    part -= z[c * R + r] * tl.sum(tl.reshape(inputs, (W, L, VECTOR)), 2)
                sums = add_to(sums, t * R + r, part * s[c * R + r])
    store_sums(sums, bias, y_TF, first, num_outputs, T, R, W, LOG)


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
    tokens, F, format = x_TD.shape[0], weight_FD.shape[0], weight_FD.format
    assert isinstance(format, Grouped)
    y_TF = torch.empty(tokens, F, dtype=out_dtype, device=x_TD.device)
    if y_TF.numel() == 0:
        return y_TF
    fixed = machine_of(x_TD.device).fixed
    tiles = None if fixed else stream_tiles(tokens, weight_FD.data.shape[1])
    if tiles is not None:
        return stream(x_TD, weight_FD, bias_F, y_TF, *tiles)
    fp8_product = None if fixed else find_fp8_product(x_TD, weight_FD)
    if fp8_product is not None:
        return fp8_product(x_TD, weight_FD, bias_F, out_dtype)
    packed = packed_kernels(x_TD.device) if not fixed and format.numbers == "int4" else None
    if packed is not None and packed.takes(x_TD, weight_FD):
        return packed.run(x_TD, weight_FD, bias_F, y_TF, packed.choose(tokens))  # type: ignore[no-any-return]
    if tokens > MULTIPLY_TOKENS[format.bits] and not fixed:
        return multiply_dense(x_TD, dequantize(weight_FD, x_TD.dtype), bias_F, out_dtype)
    return multiply(x_TD, weight_FD, bias_F, y_TF, *multiply_tiles(64 if fixed else tokens, F, format.bits))


def multiply_tiles(tokens: int, F: int, bits: int) -> tuple[int, int, int, int]:
    """Rows, columns, warps and stages of multiply_scaled. Those of 4 bits were the fastest of two shapes on an H200."""
    rows = min(64, max(16, next_power_of_2(tokens)))
    if bits == 4 and rows < 64:
        return (rows, 32, 4, 4) if rows == 16 else (rows, 16, 2, 4)
    columns = min(64, max(16, next_power_of_2(F // LEAST_PROGRAMS + 1) // 2))
    return rows, columns, 4 if columns > 16 or rows > 16 else 2, 4


def multiply(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None, y_TF: torch.Tensor,
    rows: int, columns: int, warps: int, stages: int,
) -> torch.Tensor:  # fmt: skip
    (tokens, D), F, format = x_TD.shape, weight_FD.shape[0], weight_FD.format
    assert isinstance(format, Grouped)
    depth = format.span(D) if format.bits == 4 else math.gcd(128, format.group or 128)
    if x_TD.element_size() == 4 and format.bits == 8:
        depth = min(depth, 64)
    multiply_scaled[(cdiv(F, columns), cdiv(tokens, rows))](
        x_TD, x_TD.stride(0), weight_FD.data, bias_F=bias_F, y_TF=y_TF, num_tokens=tokens, D=D, F=F,
        BM=rows, BN=columns, BK=depth, EVEN=D % depth == 0, num_warps=warps,
        num_stages=stages, **options(weight_FD), **launch_options(x_TD.device),
    )  # fmt: skip
    return y_TF


def stream_tiles(tokens: int, width: int) -> tuple[int, int, int] | None:
    """(R, W, L) for rows of `width` bytes; None: too many tokens, or more bytes than a program could hold."""
    if tokens > FEW_TOKENS:
        return None
    across = next_power_of_2(cdiv(width, 16 * NUM_LANES * MAX_LOADS))
    return (2 if across == 1 and tokens > 1 else 1, max(1, 4 // across), NUM_LANES * across) if across <= 8 else None


def stream(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None, y_TF: torch.Tensor, R: int, W: int, L: int
) -> torch.Tensor:
    tokens, F = y_TF.shape
    stream_scaled[(cdiv(F, R * W),)](
        x_TD, x_TD.stride(0), weight_FD.data, bias_F=bias_F, y_TF=y_TF, num_outputs=F, T=tokens,
        WIDTH=weight_FD.data.shape[1], R=R, W=W, L=L, LOG=(tokens * R - 1).bit_length(),
        num_warps=W * L // NUM_LANES, **options(weight_FD), **launch_options(x_TD.device),
    )  # fmt: skip
    return y_TF


def dequantize(weight_FD: Weight, dtype: torch.dtype) -> torch.Tensor:
    (F, D), (_, width) = weight_FD.shape, weight_FD.data.shape
    dense_FD = torch.empty(F, D, dtype=dtype, device=weight_FD.data.device)
    chunk = min(1024, next_power_of_2(width))
    dequantize_rows[(F, cdiv(width, chunk))](
        weight_FD.data, y_FD=dense_FD, D=D, CHUNK=chunk, **options(weight_FD), **launch_options(dense_FD.device)
    )
    return dense_FD


def find_fp8_product(x_TD: torch.Tensor, weight_FD: Weight) -> Product | None:
    """What multiplies these tensors with x in FP8 too; None: x is not quantised."""
    tokens, device = x_TD.shape[0], x_TD.device
    if not weight_FD.format.is_block_fp8 or tokens <= FEW_TOKENS:
        return None
    hopper = hopper_kernels(device)
    if hopper is not None and hopper.takes(x_TD, weight_FD):
        return hopper.run
    return multiply_by_library if tokens > LIBRARY_TOKENS and library_multiplies(x_TD, weight_FD) else None


def library_multiplies(x_TD: torch.Tensor, weight_FD: Weight) -> bool:
    """Whether the vendor's library multiplies FP8 by FP8 with these scales: in whole blocks, and in blocks of 16 bytes
    of scales."""
    F, D = weight_FD.shape
    return (
        weight_FD.tensors["scale"].dtype == torch.float32
        and x_TD.dtype == torch.bfloat16
        and F % GROUP == 0
        and D % (4 * GROUP) == 0
        and block_scales_supported(x_TD.device)
    )


@functools.cache
def block_scales_supported(device: torch.device) -> bool:
    if not is_hopper(device):
        return False
    x = torch.zeros(16, 4 * GROUP, dtype=torch.bfloat16, device=device)
    w = torch.zeros(GROUP, 4 * GROUP, dtype=torch.float8_e4m3fn, device=device)
    try:
        scaled_mm(x, w, torch.zeros(1, 4, device=device))
    except RuntimeError as error:
        log.info("this torch does not multiply FP8 with scales of blocks: %s", str(error).splitlines()[0])
        return False
    return True


def scaled_mm(x_TD: torch.Tensor, weight_FD: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    tokens = x_TD.shape[0]
    q_TD, scale_GT = quantize_rows(x_TD)
    return torch._scaled_mm(q_TD, weight_FD.t(), scale_GT.t(), scale.t(), out_dtype=x_TD.dtype)[:tokens]


def multiply_by_library(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    y_TF = scaled_mm(x_TD, weight_FD.data, weight_FD.tensors["scale"])
    return (y_TF if bias_F is None else y_TF.add_(bias_F)).to(out_dtype)


def multiply_dense(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    if out_dtype == x_TD.dtype:
        return functional.linear(x_TD, weight_FD, bias_F)
    y_TF = torch.mm(x_TD, weight_FD.T, out_dtype=out_dtype)
    return y_TF if bias_F is None else y_TF.add_(bias_F)
