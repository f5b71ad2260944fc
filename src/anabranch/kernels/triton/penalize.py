"""Penalties in place: each logit is read and written once. The arithmetic is the reference's step by step, so that
logits have the same bits and a seed draws the same tokens.

R rows of logits, V vocabulary, N rows that are penalised, P rows of the tables that count tokens.
"""

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.exact import EXACT
from anabranch.kernels.triton.launch import cdiv, launch_options, wait_for_predecessor
from anabranch.ops.penalize import PenalizeCall

BLOCK = 1024
PARTS = ["row_N", "table_row_N", "presence_N", "frequency_N", "repetition_N"]
"""Parameters that are parts of longer vectors, aligned or not: one kernel for both."""


@triton.jit(do_not_specialize_on_alignment=PARTS)
def penalize_kernel(
    logits, row_N, count_PV, prompt_PV, table_row_N, presence_N, frequency_N, repetition_N, V, stride, table_stride,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    n = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < V
    table = tl.load(table_row_N + n) * table_stride + token
    place = logits + tl.load(row_N + n) * stride + token
    count = tl.load(count_PV + table, mask=there, other=0)
    seen = (tl.load(prompt_PV + table, mask=there, other=0) != 0) | (count > 0)
    logit = tl.load(place, mask=there, other=0.0)
    factor = tl.where(seen, tl.load(repetition_N + n), 1.0)
    logit = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
    logit -= tl.load(frequency_N + n) * count.to(tl.float32)
    logit -= tl.load(presence_N + n) * (count > 0).to(tl.float32)
    tl.store(place, logit, mask=there)


def accepts(call: PenalizeCall) -> bool:
    logits_RV, *others = call
    good = logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1 and call.count_PV.dtype == torch.int32
    return good and all(x.is_contiguous() for x in others)


@ops.penalize.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def penalize(call: PenalizeCall) -> None:
    logits_RV, row_N, count_PV, prompt_PV, *others = call
    num_rows, vocabulary = row_N.shape[0], logits_RV.shape[1]
    if num_rows == 0:
        return
    penalize_kernel[(num_rows, cdiv(vocabulary, BLOCK))](
        logits_RV, row_N, count_PV, prompt_PV.view(torch.int8), *others,
        vocabulary, logits_RV.stride(0), count_PV.stride(0),
        BLOCK=BLOCK, num_warps=4, **EXACT, **launch_options(logits_RV.device),
    )  # fmt: skip
