"""The last step of experts whose rows are written out: sum the rows of each token. T tokens, K experts, D width."""

import triton
import triton.language as tl

from anabranch.kernels.triton.launch import wait_for_predecessor


@triton.jit
def sum_rows(
    expert_TK, rows_TKD, y_TD, D,
    K: tl.constexpr, KP: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y[t] = Σ_k rows[t, k] in fp32, always in the same order; rows without an expert are not read.

    FIRST: where a token names an expert twice, only the first row was written, and it holds both.
    """
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, KP)
    wait_for_predecessor(DEPENDENT)
    expert = tl.load(expert_TK + t * K + k, mask=k < K, other=-1)
    there = expert >= 0
    if FIRST:
        earlier = (expert[None, :] == expert[:, None]) & (k[None, :] < k[:, None])
        there = there & (tl.max(earlier.to(tl.int32), 1) == 0)
    mask = there[:, None] & (column < D)[None, :]
    rows = tl.load(rows_TKD + (t * K + k)[:, None] * D + column[None, :], mask=mask, other=0.0)
    tl.store(y_TD + t * D + column, tl.sum(rows.to(tl.float32), 0).to(y_TD.dtype.element_ty), mask=column < D)
