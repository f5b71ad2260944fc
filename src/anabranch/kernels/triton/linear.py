"""Dense projections of a handful of tokens: weights stream from memory once, and nothing else should take time.

T tokens, D inputs, F outputs; a program owns a few outputs and all inputs.

`stream_rows` multiplies on ordinary cores. W warps share its outputs, R for each, and `across` warps share the inputs
of an output; a thread loads 16 bytes at a time. So x is read once for R outputs, and where one warp has all inputs of
an output no sum goes through shared memory. All weight loads are issued before the first is used; with dependent launch
before the wait, since weights are parameters and only x is the result of another kernel.

With more tokens those cores become the limit. `multiply_rows` takes the matrix units: outputs are the rows of the
product, tokens (padded) its columns, and each of K warps has inputs of its own. Its weights come through a pipeline,
which begins after the wait; before it they are only prefetched, so that they are in L2 by then.

With fixed tiles linear_fixed multiplies, whatever the sizes.

On Hopper some tens of tokens and middling weights are linear_hopper's, which shares out the inputs too.

Sums are fp32 and in a fixed order.
"""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.formats import PLAIN
from anabranch.kernels.triton import linear_fixed, linear_quantized
from anabranch.kernels.triton.launch import (
    FLOATS,
    cdiv,
    gluon_kernels,
    launch_options,
    machine_of,
    next_power_of_2,
    prefetch,
    wait_for_predecessor,
)
from anabranch.kernels.triton.quantized import KINDS, is_supported
from anabranch.kernels.triton.stream import add_to, load_inside, store_sums
from anabranch.ops.weight import Weight

STREAM_TOKENS, STREAM_MORE_TOKENS = 2, 4
"""Up to how many tokens `stream_rows` is taken, as a rule and where outputs are very few or very many."""
MULTIPLY_TOKENS, ROUTER_TOKENS = 16, 64
"""Likewise `multiply_rows`: with all tokens in a program, and in blocks of as many where outputs are few. Beyond, the
vendor's library."""
FEW_OUTPUTS, MANY_OUTPUTS = 512, 1 << 15
"""A router's at most; a vocabulary at least."""
MULTIPLY_WEIGHTS = 8 << 20
"""Up to this many weights `multiply_rows` is faster than the library on an H200; with more it is limited by the
multiprocessors' shared memory."""
SPLIT_TOKENS, SPLIT_WEIGHTS = range(3, 33), range(1 << 22, (1 << 23) + 1)
"""Of linear_hopper. 4096 → 2048 on an H200, 16 tokens: 7.6 µs, `multiply_rows` 11.5, the library 9.9; 4 tokens: 7.7,
`multiply_rows` 8.1; 32 tokens: 8.7, the library 10.1. With 64 tokens or 10 million weights the library is faster."""
hopper_kernels = functools.partial(gluon_kernels, "linear_hopper")
EARLY = False
"""See wait_for_predecessor."""
NUM_LANES, NUM_STAGES, LEAST_COLUMNS = (64, 2, 16) if torch.version.hip else (32, 4, 8)
"""Of a warp; of a pipeline that fits in half of the shared memory; of a product on the matrix units."""
MAX_LOADS = 16
"""16-byte loads of weights that a thread of `stream_rows` may have under way: they are its registers."""


@triton.jit
def stream_rows(
    x_TD, weight_FD, bias_F, y_TF, x_stride, weight_stride, num_outputs,
    T: tl.constexpr, D: tl.constexpr, R: tl.constexpr, W: tl.constexpr, L: tl.constexpr, V: tl.constexpr,
    LOG: tl.constexpr, DEPENDENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """R tiles [W, L · V] of weights: outputs r · W .. (r + 1) · W, and L · V inputs at a time. 2^LOG ≥ T · R."""
    STEP: tl.constexpr = L * V
    CHUNKS: tl.constexpr = (D + STEP - 1) // STEP
    first = tl.program_id(0) * (R * W)
    output_W = first + tl.arange(0, W)
    d = tl.arange(0, STEP)[None, :]
    w = ()
    bias = ()
    for c in tl.static_range(CHUNKS):
        for r in tl.static_range(R):
            row_W = tl.minimum(output_W + r * W, num_outputs - 1).to(tl.int64)
            w = w + (load_inside(weight_FD + (row_W * weight_stride)[:, None], d, c, STEP, D, "evict_first"),)
    if bias_F is not None:
        for r in tl.static_range(R):
            bias = bias + (tl.load(bias_F + tl.minimum(output_W + r * W, num_outputs - 1)).to(tl.float32),)
    # All weight loads are to be under way before the first is used; the assembler would save registers instead.
    tl.debug_barrier()
    wait_for_predecessor(DEPENDENT, EARLY)
    # A copy of x for each warp: it arrives in the registers where the weights are, without a detour.
    x_W = x_TD + tl.zeros((W, 1), tl.int32)
    sums = ()
    for _ in tl.static_range(T * R):
        sums = sums + (tl.zeros((W, L), tl.float32),)
    for c in tl.static_range(CHUNKS):
        for t in tl.static_range(T):
            x = load_inside(x_W + t * x_stride, d, c, STEP, D, "").to(tl.float32)
            for r in tl.static_range(R):
                products = tl.reshape(w[c * R + r].to(tl.float32) * x, (W, L, V))
                sums = add_to(sums, t * R + r, tl.sum(products, 2))
    store_sums(sums, bias, y_TF, first, num_outputs, T, R, W, LOG)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_rows(
    x_TD, weight_FD, bias_F, y_TF, x_stride, weight_stride, num_outputs, num_tokens,
    TP: tl.constexpr, D: tl.constexpr, R: tl.constexpr, K: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
    LINES: tl.constexpr, PER_LINE: tl.constexpr, DEPENDENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """R outputs of a block of TP tokens; each of K warps has C inputs of every K · C."""
    STEP: tl.constexpr = K * C
    output_R = tl.program_id(0) * R + tl.arange(0, R)
    row_R = tl.minimum(output_R, num_outputs - 1).to(tl.int64)
    if DEPENDENT:
        line = tl.minimum(tl.arange(0, LINES) * PER_LINE, D - 1)
        prefetch(weight_FD + (row_R * weight_stride)[:, None] + line[None, :])
    if bias_F is not None:
        bias_R = tl.load(bias_F + row_R).to(tl.float32)
    wait_for_predecessor(DEPENDENT, EARLY)
    t = tl.program_id(1) * TP + tl.arange(0, TP)
    k = tl.arange(0, K)[:, None, None] * C
    d_w = k + tl.arange(0, C)[None, None, :]
    d_x = k + tl.arange(0, C)[None, :, None]
    w_ptr = weight_FD + (row_R * weight_stride)[None, :, None] + d_w
    x_ptr = x_TD + (t * x_stride)[None, None, :] + d_x
    is_token = (t < num_tokens)[None, None, :]
    sum_KRT = tl.zeros((K, R, TP), tl.float32)
    for begin in tl.range(0, D, STEP, num_stages=STAGES):
        if D % STEP == 0:
            w = tl.load(w_ptr + begin, eviction_policy="evict_first")
            x = tl.load(x_ptr + begin, mask=is_token, other=0.0)
        else:
            w = tl.load(w_ptr + begin, mask=begin + d_w < D, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + begin, mask=is_token & (begin + d_x < D), other=0.0)
        sum_KRT = tl.dot(w, x, sum_KRT, input_precision="ieee")
    y_RT = tl.sum(sum_KRT, 0)
    if bias_F is not None:
        y_RT += bias_R[:, None]
    place = t[None, :] * num_outputs + output_R[:, None]
    mask = (t < num_tokens)[None, :] & (output_R < num_outputs)[:, None]
    tl.store(y_TF + place, y_RT.to(y_TF.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class StreamTiles:
    """R outputs of each of W warps; `across` warps share the inputs of an output."""

    rows: int
    warps: int
    across: int = 1


@dataclass(frozen=True, slots=True)
class MultiplyTiles:
    """R outputs of a program; each of K warps has C inputs at a time."""

    rows: int
    warps: int
    depth: int
    stages: int


Tiles = StreamTiles | MultiplyTiles


@functools.cache
def choose(tokens: int, D: int, F: int, itemsize: int) -> Tiles | None:
    """None: too many tokens, or more inputs than a thread could hold."""
    few = F <= FEW_OUTPUTS
    if tokens > (STREAM_MORE_TOKENS if few or F >= MANY_OUTPUTS or itemsize == 4 else STREAM_TOKENS):
        if itemsize != 2 or tokens > (ROUTER_TOKENS if few else MULTIPLY_TOKENS) or D * F > MULTIPLY_WEIGHTS:
            return None
        return MultiplyTiles(16, 4, 64 if few else 128, NUM_STAGES)
    chunks = cdiv(D * itemsize, 16 * NUM_LANES)  # loads of one warp for one output
    across = 1 if chunks <= 12 else min(next_power_of_2(cdiv(chunks, 8)), 8)
    if few:
        # So few outputs leave most of the chip idle: all that counts is that each is quickly done.
        across = min(next_power_of_2(chunks), 8)
    loads = cdiv(chunks, across)
    if loads > MAX_LOADS:
        return None
    rows = 2 if F >= 4096 and loads <= 12 else 1
    return StreamTiles(rows, 1 if few else max(1, 4 // across), across)


def run(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, out_dtype: torch.dtype, tiles: Tiles
) -> torch.Tensor:
    (tokens, D), F = x_TD.shape, weight_FD.shape[0]
    y_TF = torch.empty(tokens, F, dtype=out_dtype, device=x_TD.device)
    if y_TF.numel() == 0:
        return y_TF
    launch = {"EARLY": EARLY, **launch_options(x_TD.device)}
    common = (x_TD, weight_FD, bias_F, y_TF, x_TD.stride(0), weight_FD.stride(0), F)
    if isinstance(tiles, StreamTiles):
        stream_rows[(cdiv(F, tiles.rows * tiles.warps),)](
            *common,
            T=tokens, D=D, R=tiles.rows, W=tiles.warps, L=NUM_LANES * tiles.across, V=16 // x_TD.element_size(),
            LOG=(tokens * tiles.rows - 1).bit_length(), num_warps=tiles.warps * tiles.across, **launch,
        )  # fmt: skip
        return y_TF
    per_line = 128 // x_TD.element_size()
    block = max(LEAST_COLUMNS, min(MULTIPLY_TOKENS, next_power_of_2(tokens)))
    multiply_rows[(cdiv(F, tiles.rows), cdiv(tokens, block))](
        *common, tokens,
        TP=block, D=D, R=tiles.rows, K=tiles.warps, C=tiles.depth, STAGES=tiles.stages,
        LINES=next_power_of_2(cdiv(D, per_line)), PER_LINE=per_line, num_warps=tiles.warps, **launch,
    )  # fmt: skip
    return y_TF


def hopper_for(x_TD: torch.Tensor, weight_FD: torch.Tensor) -> ModuleType | None:
    """linear_hopper where it is the faster. Not for routers: they run at the same time as projections, and
    its launches must not."""
    F = weight_FD.shape[0]
    if x_TD.shape[0] not in SPLIT_TOKENS or weight_FD.numel() not in SPLIT_WEIGHTS or F <= FEW_OUTPUTS:
        return None
    hopper = hopper_kernels(x_TD.device)
    return hopper if hopper is not None and hopper.takes(x_TD, weight_FD) else None


def accepts(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> bool:
    fixed = machine_of(x_TD.device).fixed
    if weight_FD.format is not PLAIN:
        good = x_TD.dim() == 2 and x_TD.dtype in FLOATS and x_TD.stride(1) == 1 and len(weight_FD.shape) == 2
        return good and is_supported(weight_FD, x_TD.dtype) and out_dtype in (None, x_TD.dtype, torch.float32)
    data_FD = weight_FD.data
    return (
        x_TD.dim() == 2
        and (fixed or x_TD.shape[0] <= ROUTER_TOKENS)
        and x_TD.dtype in FLOATS
        and x_TD.dtype == data_FD.dtype
        and out_dtype in (None, x_TD.dtype, torch.float32)
        and x_TD.stride(1) == 1
        and data_FD.stride(1) == 1
        and (bias_F is None or bias_F.is_contiguous())
        and (
            fixed
            or hopper_for(x_TD, data_FD) is not None
            or choose(*x_TD.shape, data_FD.shape[0], x_TD.element_size()) is not None
        )
    )


@ops.linear.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts, traits=KINDS)
def linear(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    if weight_FD.format is not PLAIN:
        return linear_quantized.run(x_TD, weight_FD, bias_F, out_dtype or x_TD.dtype)
    data_FD = weight_FD.data
    if machine_of(x_TD.device).fixed:
        return linear_fixed.multiply(x_TD, data_FD, bias_F, out_dtype or x_TD.dtype)
    hopper = hopper_for(x_TD, data_FD)
    if hopper is not None:
        return hopper.run(x_TD, data_FD, bias_F, out_dtype or x_TD.dtype)
    tiles = choose(*x_TD.shape, data_FD.shape[0], x_TD.element_size())
    assert tiles is not None
    return run(x_TD, data_FD, bias_F, out_dtype or x_TD.dtype, tiles)
