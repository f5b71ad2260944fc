"""RMSNorm, with or without an addition before or after it: a row is read once and stays in registers.

T tokens, D normalised width, K experts per token, R rows of a program; a row may be one head of a token.

The weight is a parameter, so with dependent launch it is loaded before the wait.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton import split_rows
from anabranch.kernels.triton.launch import (
    FLOATS,
    cdiv,
    is_hopper,
    launch_options,
    machine_of,
    next_power_of_2,
    wait_for_predecessor,
)
from anabranch.kernels.triton.quantize_rows import FEW_TOKENS, GROUP, attach, new_rows, store_groups
from anabranch.kernels.triton.split_rows import store_parts

MAX_WIDTH = 16384
"""Above, a row would not fit in the registers of a program."""
NARROW = 512
"""Elements of a program of one warp: several rows where they are narrow."""
EARLY_TOKENS = 16
"""Up to so many, the next kernel, which loads its weights first, starts before the wait. On an H200 decode of one
request was 1.2 to 2 % faster with it, of 64 requests 0.5 to 1.2 % slower."""
AHEAD_BYTES = 1 << 16
"""Bytes of experts' rows that a program loads before it adds the first: 64 registers of each thread of 8 warps."""
REGISTERS = 1 << 16
"""Of a multiprocessor. With an explicit limit per program, NVIDIA's assembler loads those rows at once; without, it
saves registers and loads two or three at a time."""


@triton.jit(do_not_specialize=["num_rows", "eps", "q_stride"])
def norm_kernel(
    x, expert, residual, weight, after, factor, y, total, q, q_scale, q_sum, num_rows,
    x_stride, x_head_stride, residual_stride, after_stride, q_stride, eps,
    D: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row r of x is head r % HEADS of token r // HEADS; y and total are contiguous.

    With `expert`, a token has K rows, x_head_stride apart, and x is the sum of those with an expert. `residual` is
    added before the norm, and the sum stored in `total`; `after` is added after it, and the sum multiplied by `factor`.
    With `q`, the result is also stored in FP8: with `q_sum` in two parts (see split_rows), else in groups (see
    quantize_rows).
    """
    column = tl.arange(0, BLOCK)[None, :]
    inside = column < D
    if weight is not None:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_predecessor(DEPENDENT, EARLY)
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token_R = (row_R // HEADS).to(tl.int64)
    start_R = token_R * x_stride + (row_R % HEADS) * x_head_stride
    mask = (row_R < num_rows)[:, None] & inside
    if expert is None:
        value = tl.load(x + start_R[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    else:
        summed = sum_experts(
            x + start_R[:, None] + column, x_head_stride, expert + token_R * K, row_R < num_rows, inside, K, AHEAD
        )
        value = summed.to(x.dtype.element_ty).to(tl.float32)
    place = row_R.to(tl.int64)[:, None] * D + column
    if residual is not None:
        value += tl.load(residual + (token_R * residual_stride)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        value = rounded.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) * (1.0 / D) + eps)[:, None]
    if weight is not None:
        normed *= scale
    if after is not None:
        addend = tl.load(after + (token_R * after_stride)[:, None] + column, mask=mask, other=0.0).to(tl.float32)
        normed = normed.to(y.dtype.element_ty).to(tl.float32) + addend
        if factor is not None:
            normed = normed.to(y.dtype.element_ty).to(tl.float32) * tl.load(factor).to(tl.float32)
    rounded_y = normed.to(y.dtype.element_ty)
    tl.store(y + place, rounded_y, mask=mask)
    if q_sum is not None:
        store_parts(rounded_y.to(tl.float32), row_R, row_R < num_rows, q, q_scale, q_sum, D)
    elif q is not None:
        groups = tl.reshape(rounded_y.to(tl.float32), (ROWS, BLOCK // 128, 128))
        store_groups(groups, row_R, row_R < num_rows, 0, q, q_scale, q_stride, D)


@triton.jit
def sum_experts(row, stride, expert_R, mask_R, inside, K: tl.constexpr, AHEAD: tl.constexpr):
    """Σ_k of rows with an expert, in fp32 and in the order of k; other rows are not read."""
    there = ()
    for k in tl.static_range(K):
        there = there + (tl.load(expert_R + k, mask=mask_R, other=-1) >= 0,)
    value = tl.zeros(row.shape, tl.float32)
    for begin in tl.static_range(0, K, AHEAD):
        rows = ()
        for k in tl.static_range(begin, min(begin + AHEAD, K)):
            rows = rows + (tl.load(row + k * stride, mask=there[k][:, None] & inside, other=0.0),)
        for k in tl.static_range(len(rows)):
            value += rows[k].to(tl.float32)
    return value


def launch(
    x: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor | None,
    eps: float,
    num_warps: int | None = None,
    *,
    expert_TK: torch.Tensor | None = None,
    after_TD: torch.Tensor | None = None,
    factor_1: torch.Tensor | None = None,
    fp8: str = "",
) -> tuple[torch.Tensor, Any]:
    """(norm, sum or None); x is [T, D] or [T, G, D] with any strides but the last. With `expert_TK` it is [T, K, D],
    and each token's rows with an expert are summed first."""
    top_k, width = 0 if expert_TK is None else x.shape[1], x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 and not top_k else 1
    y = torch.empty((x.shape[0], width) if top_k else x.shape, dtype=x.dtype, device=x.device)
    total_TD = None if residual_TD is None else torch.empty_like(y)
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return y, total_TD
    block = next_power_of_2(width)
    rows = max(1, NARROW // block)
    num_warps = num_warps or choose_warps(block)
    options = launch_options(x.device)
    q_TD, q_scale, q_sum = attach_rows(y, fp8)
    norm_kernel[(cdiv(num_rows, rows),)](
        x, expert_TK, residual_TD, weight_D, after_TD, factor_1, y, total_TD, q_TD, q_scale, q_sum, num_rows,
        x.stride(0), x.stride(1) if x.dim() == 3 else 0,
        0 if residual_TD is None else residual_TD.stride(0), 0 if after_TD is None else after_TD.stride(0),
        0 if q_TD is None else q_TD.shape[0], eps,
        D=width, HEADS=heads, ROWS=rows, BLOCK=block, K=top_k,
        AHEAD=max(1, AHEAD_BYTES // (block * x.element_size())) if top_k else 0,
        EARLY=x.shape[0] <= EARLY_TOKENS, num_warps=num_warps, **options,
        **({"maxnreg": min(255, REGISTERS // (32 * num_warps))} if options["DEPENDENT"] and top_k else {}),
    )  # fmt: skip
    return y, total_TD


def attach_rows(y: torch.Tensor, fp8: str) -> tuple[torch.Tensor | None, ...]:
    """(data, scales, sums) of y's rows in FP8, for the kernel to fill; None where no kernel reads rows in that form."""
    tokens, width = y.shape[0], y.shape[-1]
    if not fp8 or machine_of(y.device).fixed or not is_hopper(y.device):
        return None, None, None
    if fp8 == "groups" and tokens > FEW_TOKENS and width % GROUP == 0:
        rows = new_rows(tokens, width, y.device)
        attach(y, rows)
        return *rows, None
    few = split_rows.FEW_TOKENS < tokens <= split_rows.MANY_TOKENS
    if fp8 == "parts" and few and width % 64 == 0 and width >= NARROW and y.dtype == torch.bfloat16:
        parts = split_rows.new_parts(tokens, width, y.device)
        setattr(y, split_rows.ATTACHED, parts)
        return parts
    return None, None, None


def choose_warps(block: int) -> int:
    """8 elements per lane, more where that would need more than 8 warps."""
    return min(max(block // 256, 1), 8 if block <= 8192 else 16)


def accepts(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> bool:
    return x.dim() in (2, 3) and _fits(x) and (weight_D is None or weight_D.is_contiguous())


@ops.rms_norm.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    return launch(x, None, weight_D, eps)[0]


def accepts_add(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> bool:
    same = x_TD.shape == residual_TD.shape and x_TD.dtype == residual_TD.dtype
    return x_TD.dim() == 2 and same and _fits(x_TD) and _fits(residual_TD) and weight_D.is_contiguous()


@ops.add_rms_norm.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_add)
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch(x_TD, residual_TD, weight_D, eps, fp8=fp8)


def accepts_sum(
    rows_TKD: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    fp8: str = "",
) -> bool:
    return (
        rows_TKD.dim() == 3
        and rows_TKD.shape[:2] == expert_TK.shape
        and rows_TKD.shape[1] > 0
        and expert_TK.dtype == torch.int32
        and expert_TK.is_contiguous()
        and accepts_add(rows_TKD[:, 0], residual_TD, weight_D, eps)
    )


@ops.sum_add_rms_norm.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_sum, traits=("sums_rows",))
def sum_add_rms_norm(
    rows_TKD: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    fp8: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch(rows_TKD, residual_TD, weight_D, eps, expert_TK=expert_TK, fp8=fp8)


def accepts_norm_add(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: torch.Tensor,
    scale_1: torch.Tensor | None = None,
) -> bool:
    return accepts_add(x_TD, residual_TD, weight_D, eps)


@ops.norm_add.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts_norm_add)
def norm_add(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: torch.Tensor,
    scale_1: torch.Tensor | None = None,
) -> torch.Tensor:
    return launch(x_TD, None, weight_D, eps, after_TD=residual_TD, factor_1=scale_1)[0]


def _fits(x: torch.Tensor) -> bool:
    return x.dtype in FLOATS and x.stride(-1) == 1 and 0 < x.shape[-1] <= MAX_WIDTH
