"""Activations as two numbers in FP8 whose sum they are. T tokens, D inputs, G groups of 128 inputs.

A row is divided by a power of two so that its largest number is below 256. A number of bf16 has 8 bits: its first part
has 4 of them, and what is left has at most 4. So the sum of both is the number, unless it is less than 1/512 of the
largest: then it is off by up to 2⁻¹⁷ of the largest. What is not finite stays so, in its row.
"""

import torch
import triton
import triton.language as tl

from anabranch.kernels.triton.launch import FP8, launch_options, next_power_of_2, wait_for_predecessor


@triton.jit
def rounded(x):
    """The nearest number of FP8, in fp32. Not by a conversion to FP8 and back: of four numbers that a thread converts
    and also stores, ptxas 12.8 converts two back from a register that does not hold them."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits after the first, ties to even
    nearest = tl.where(tl.abs(x) < 0.015625, x + 24576.0 - 24576.0, bits.to(tl.float32, bitcast=True))  # small: n · 2⁻⁹
    return tl.where(x == x, nearest, x)  # the bits of a NaN may be all ones


@triton.jit
def split_row(x_TD, x_stride, q_T2D, scale_T, sum_TG, D, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    # The next kernel may read parameters, and the experts' plan: that was complete when this kernel was launched.
    wait_for_predecessor(DEPENDENT, True)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_TD + row * x_stride + column, mask=column < D, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(x), 0)
    exponent = tl.minimum(tl.maximum(most.to(tl.int32, bitcast=True) >> 23, 20), 254)
    x *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    first = rounded(x)
    second = rounded(x - first)
    q_row = q_T2D + row * 2 * D + column
    tl.store(q_row, first.to(q_T2D.dtype.element_ty), mask=column < D)
    tl.store(q_row + D, second.to(q_T2D.dtype.element_ty), mask=column < D)
    tl.store(scale_T + row, ((exponent - 7) << 23).to(tl.float32, bitcast=True))
    total = tl.sum(tl.reshape(first + second, [BLOCK // 128, 128]), 1)
    group = tl.arange(0, BLOCK // 128)
    tl.store(sum_TG + row * (D // 128) + group, total, mask=group < D // 128)


def split_rows(x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(both parts of each row, what they are to be multiplied by, their sums of every 128)"""
    tokens, D = x_TD.shape
    q_T2D = torch.empty(tokens, 2, D, dtype=FP8, device=x_TD.device)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    sum_TG = torch.empty(tokens, max(1, D // 128), dtype=torch.float32, device=x_TD.device)
    split_row[(tokens,)](
        x_TD, x_TD.stride(0), q_T2D, scale_T, sum_TG, D, BLOCK=max(256, next_power_of_2(D)),
        num_warps=min(16, max(4, next_power_of_2(D) // 1024)), **launch_options(x_TD.device),
    )  # fmt: skip
    return q_T2D, scale_T, sum_TG
