"""Activations as two numbers in FP8 whose sum they are. T tokens, D inputs, G groups of 128 inputs.

A row is divided by a power of two so that its largest number is below 256. A number of bf16 has 8 bits: its first part
has 4 of them, and what is left has at most 4. So the sum of both is the number, unless it is less than 1/512 of the
largest: then it is off by up to 2⁻¹⁷ of the largest. What is not finite stays so, in its row.
"""

import torch
import triton
import triton.language as tl

from anabranch.kernels.triton.launch import FP8, launch_options, next_power_of_2, wait_for_predecessor

FEW_TOKENS, MANY_TOKENS = 4, 64
"""Up to FEW_TOKENS, activations are multiplied as they are; up to MANY_TOKENS, all that read them take both parts."""
ATTACHED = "fp8_parts"
"""The attribute of a tensor that holds both parts of its rows."""


@triton.jit
def rounded(x):
    """The nearest number of FP8, in fp32. Not by a conversion to FP8 and back: of four numbers that a thread converts
    and also stores, ptxas 12.8 converts two back from a register that does not hold them."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits after the first, ties to even
    nearest = tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, bits.to(tl.float32, bitcast=True))  # small: n · 2⁻⁹
    return tl.where(x == x, nearest, x)  # the bits of a NaN may be all ones


@triton.jit
def store_parts(x_RD, row_R, real_R, q_T2D, scale_T, sum_TG, D):
    """Both parts of R rows of fp32, of which those that are real are stored."""
    most_R = tl.max(tl.abs(x_RD), 1)
    exponent_R = tl.minimum(tl.maximum(most_R.to(tl.int32, bitcast=True) >> 23, 20), 254)
    x_RD *= ((261 - exponent_R) << 23).to(tl.float32, bitcast=True)[:, None]
    first = rounded(x_RD)
    second = rounded(x_RD - first)
    column = tl.arange(0, x_RD.shape[1])[None, :]
    place, mask = row_R.to(tl.int64)[:, None] * 2 * D + column, real_R[:, None] & (column < D)
    tl.store(q_T2D + place, first.to(q_T2D.dtype.element_ty), mask=mask)
    tl.store(q_T2D + place + D, second.to(q_T2D.dtype.element_ty), mask=mask)
    tl.store(scale_T + row_R, ((exponent_R - 7) << 23).to(tl.float32, bitcast=True), mask=real_R)
    total_RG = tl.sum(tl.reshape(first + second, [x_RD.shape[0], x_RD.shape[1] // 128, 128]), 2)
    group = tl.arange(0, x_RD.shape[1] // 128)[None, :]
    tl.store(sum_TG + row_R[:, None] * (D // 128) + group, total_RG, mask=real_R[:, None] & (group < D // 128))


@triton.jit
def split_row(x_TD, x_stride, q_T2D, scale_T, sum_TG, D, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    # The next kernel may read parameters, and the experts' plan: that was complete when this kernel was launched.
    wait_for_predecessor(DEPENDENT, True)
    row_R = tl.program_id(0) + tl.zeros([1], tl.int32)
    place = row_R.to(tl.int64)[:, None] * x_stride + tl.arange(0, BLOCK)[None, :]
    x_RD = tl.load(x_TD + place, mask=(tl.arange(0, BLOCK) < D)[None, :], other=0.0).to(tl.float32)
    store_parts(x_RD, row_R, row_R >= 0, q_T2D, scale_T, sum_TG, D)


Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(both parts of each row, what they are to be multiplied by, their sums of every 128)"""


def new_parts(tokens: int, D: int, device: torch.device) -> Parts:
    scale_T = torch.empty(tokens, dtype=torch.float32, device=device)
    sum_TG = torch.empty(tokens, max(1, D // 128), dtype=torch.float32, device=device)
    return torch.empty(tokens, 2, D, dtype=FP8, device=device), scale_T, sum_TG


def split_rows(x_TD: torch.Tensor) -> Parts:
    """Those that the kernel that wrote x attached, or new ones."""
    found: Parts | None = getattr(x_TD, ATTACHED, None)
    if found is not None:
        return found
    tokens, D = x_TD.shape
    q_T2D, scale_T, sum_TG = new_parts(tokens, D, x_TD.device)
    split_row[(tokens,)](
        x_TD, x_TD.stride(0), q_T2D, scale_T, sum_TG, D, BLOCK=max(256, next_power_of_2(D)),
        num_warps=min(16, max(4, next_power_of_2(D) // 1024)), **launch_options(x_TD.device),
    )  # fmt: skip
    return q_T2D, scale_T, sum_TG
