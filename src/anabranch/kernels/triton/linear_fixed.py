"""Dense projections for `--deterministic`: what a row gives does not depend on how many others there are.

T tokens, H heads (1 where all inputs are one vector), D inputs, F outputs. Inputs are added in the same order by every
tile: in steps that the matrix unit makes, one after the other, never shared out among programs or warps. On Hopper some
tiles are for few tokens and some for many; these are always the narrow side of the matrix unit (`SWAP`, as in
experts_grouped).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton import launch
from anabranch.kernels.triton.experts_grouped import product, tile_of_program
from anabranch.kernels.triton.launch import (
    FLOATS,
    cdiv,
    launch_options,
    machine_of,
    next_power_of_2,
    wait_for_predecessor,
)
from anabranch.kernels.tuning.experts_tiles import Machine
from anabranch.platforms import Platform

FEW_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FixedTile:
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False


def choose(tokens: int, dtype: torch.dtype, machine: Machine) -> FixedTile:
    if dtype == torch.float32:
        return FixedTile(32, 32, 32, 4, 2)
    if not machine.wgmma:  # which unit the compiler takes may depend on the tile, so there is one
        return FixedTile(64, 64, 64, 4, 3)
    if tokens <= FEW_TOKENS:
        return FixedTile(max(16, next_power_of_2(tokens)), 64, 64, 4, 4, swap=True)
    return FixedTile(128, 128, 64, 8, 4, swap=True)


@triton.jit(do_not_specialize=["num_tokens"])
def multiply_fixed(
    x_THD, weight_HFD, bias_F, y_THF, num_tokens, num_outputs,
    x_stride, x_head_stride, weight_stride, weight_depth_stride, weight_head_stride, y_stride, y_head_stride,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM tokens, for one head."""
    tile, block = tile_of_program(tl.cdiv(num_tokens, BM), tl.cdiv(num_outputs, BN), 8)
    head = tl.program_id(1).to(tl.int64)
    output = block * BN + tl.arange(0, BN)
    row = tl.minimum(output, num_outputs - 1).to(tl.int64)
    token = tile * BM + tl.arange(0, BM)
    real = token < num_tokens
    wait_for_predecessor(DEPENDENT)
    x_ptr = x_THD + head * x_head_stride + token.to(tl.int64)[:, None] * x_stride
    w_ptr = weight_HFD + head * weight_head_stride + row[:, None] * weight_stride
    acc = product(x_ptr, real, w_ptr, D, BM, BN, BK, D % BK == 0, SWAP, weight_depth_stride)
    if SWAP:
        acc = tl.trans(acc)
    if bias_F is not None:
        acc += tl.load(bias_F + row).to(tl.float32)[None, :]
    y_ptr = y_THF + head * y_head_stride + token.to(tl.int64)[:, None] * y_stride + output[None, :]
    tl.store(y_ptr, acc.to(y_THF.dtype.element_ty), mask=real[:, None] & (output < num_outputs)[None, :])


def run(x_THD: torch.Tensor, weight_HFD: torch.Tensor, bias_F: torch.Tensor | None, y_THF: torch.Tensor) -> None:
    """y = x · weightᵀ of each head; weights may have any strides."""
    (tokens, heads, D), F = x_THD.shape, y_THF.shape[2]
    if y_THF.numel() == 0:
        return
    tile = choose(tokens, x_THD.dtype, machine_of(x_THD.device))
    multiply_fixed[(cdiv(tokens, tile.rows) * cdiv(F, tile.columns), heads)](
        x_THD, weight_HFD, bias_F, y_THF, tokens, F,
        x_THD.stride(0), x_THD.stride(1), weight_HFD.stride(1), weight_HFD.stride(2), weight_HFD.stride(0),
        y_THF.stride(0), y_THF.stride(1),
        D=D, BM=tile.rows, BN=tile.columns, BK=tile.depth, SWAP=tile.swap,
        num_warps=tile.warps, num_stages=tile.stages, **launch_options(x_THD.device),
    )  # fmt: skip


def multiply(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    y_TF = torch.empty(x_TD.shape[0], weight_FD.shape[0], dtype=out_dtype, device=x_TD.device)
    run(x_TD[:, None], weight_FD[None], bias_F, y_TF[:, None])
    return y_TF


def accepts_heads(x_THD: torch.Tensor, weight_HDF: torch.Tensor) -> bool:
    return x_THD.dtype in FLOATS and x_THD.dtype == weight_HDF.dtype and x_THD.stride(2) == 1


def is_wanted(platform: Platform) -> bool:
    return launch.fixed_tiles


@ops.linear_heads.kernel("triton", on=("cuda", "hip", "xpu"), needs=is_wanted, accepts=accepts_heads)
def linear_heads(x_THD: torch.Tensor, weight_HDF: torch.Tensor) -> torch.Tensor:
    y_THF = x_THD.new_empty(*x_THD.shape[:2], weight_HDF.shape[2])
    run(x_THD, weight_HDF.transpose(1, 2), None, y_THF)
    return y_THF
