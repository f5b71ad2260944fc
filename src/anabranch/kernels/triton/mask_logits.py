"""Bit masks in place: only forbidden logits are written, and none is read.

R rows of logits, V vocabulary, N rows that are masked, M words of 32 bits.
"""

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.launch import cdiv, launch_options, wait_for_predecessor

BLOCK = 2048


@triton.jit(do_not_specialize=["num_words", "value"], do_not_specialize_on_alignment=["row_N", "allowed"])
def mask_kernel(
    logits, row_N, allowed, V, stride, num_words, words_stride, value, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    n = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(allowed + n.to(tl.int64) * words_stride + token // 32, mask=token < num_words * 32, other=0)
    forbidden = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + tl.load(row_N + n) * stride + token, value, mask=forbidden & (token < V))


def accepts(
    logits_RV: torch.Tensor, row_N: torch.Tensor, allowed_NM: torch.Tensor, value: float = float("-inf")
) -> bool:
    return (
        logits_RV.dtype == torch.float32
        and logits_RV.stride(1) == 1
        and row_N.is_contiguous()
        and allowed_NM.stride(1) == 1
    )


@ops.mask_logits.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def mask_logits(
    logits_RV: torch.Tensor, row_N: torch.Tensor, allowed_NM: torch.Tensor, value: float = float("-inf")
) -> None:
    (num_rows, num_words), vocabulary = allowed_NM.shape, logits_RV.shape[1]
    if num_rows == 0:
        return
    mask_kernel[(num_rows, cdiv(vocabulary, BLOCK))](
        logits_RV, row_N, allowed_NM, vocabulary, logits_RV.stride(0), num_words, allowed_NM.stride(0), value,
        BLOCK=BLOCK, num_warps=4, **launch_options(logits_RV.device),
    )  # fmt: skip
