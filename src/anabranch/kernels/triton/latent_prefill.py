"""Attention over latent rows for requests with several new tokens: blocks of queries, each against all that they see.

T token rows, R requests, H query heads, L latent dims, F dims that have turned, S slots in a page, M page-table width;
BM queries of a program, BN rows in a block. LP, FP, RP are L, F, R + 1 rounded up.

As attention_prefill: query i of a request is head i % H of its token i // H, so that the heads of a token read rows
together.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.attention_decode import LOWEST
from anabranch.kernels.triton.attention_prefill import find_rows


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "scale", "table_stride", "trigger", "alone"])
def attend_latent_rows(
    q_THL, q_turned_THF, rows_PSC, page_table_RM, query_start_R, context_len_R, out_THL,
    num_tokens, num_requests, scale,
    q_stride, q_head_stride, turned_stride, turned_head_stride, page_stride, table_stride, trigger, alone,
    H: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, S: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, RP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores times `scale` are base-2 logarithms. Requests with one new token are skipped unless `alone`."""
    b = tl.num_programs(0) - 1 - tl.program_id(0)
    r, begin, num_queries, num_rows, length, first_row = find_rows(
        query_start_R, context_len_R, num_requests, num_tokens, trigger, tl.arange(0, RP), b, H, BM, DEPENDENT
    )
    if first_row >= num_rows:
        return
    if (r < num_requests) & (num_queries == 1) & (alone == 0):
        return

    row, latent, turned = first_row + tl.arange(0, BM), tl.arange(0, LP), tl.arange(0, FP)
    token, head = (begin + row // H).to(tl.int64), (row % H).to(tl.int64)
    is_row = (row < num_rows)[:, None] & (latent < L)[None, :]
    if r == num_requests:
        out_ptr = out_THL + (token * H + head)[:, None] * L + latent[None, :]
        tl.store(out_ptr, tl.zeros([BM, LP], out_THL.dtype.element_ty), mask=is_row)
        return
    q = tl.load(q_THL + (token * q_stride + head * q_head_stride)[:, None] + latent[None, :], mask=is_row, other=0.0)
    q_turned = tl.load(
        q_turned_THF + (token * turned_stride + head * turned_head_stride)[:, None] + turned[None, :],
        mask=(row < num_rows)[:, None] & (turned < F)[None, :], other=0.0,
    )  # fmt: skip
    position = length - num_queries + row // H
    first_position = length - num_queries + first_row // H
    last_position = tl.minimum(length - num_queries + (first_row + BM - 1) // H, length - 1)
    table = page_table_RM + r * table_stride
    # Slots without a row of the request may contain anything: one that some query sees is read instead.
    page = tl.load(table + tl.minimum(tl.arange(0, BN), last_position) // S)
    peak = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, LP], tl.float32)
    for block in range(0, (last_position + BN) // BN):
        key = block * BN + tl.arange(0, BN)
        inside = tl.minimum(key, last_position)
        offset = (page.to(tl.int64) * page_stride + (inside % S) * (L + F))[:, None]
        # One block ahead: the page must be known before its rows can be loaded.
        page = tl.load(table + tl.minimum(key + BN, last_position) // S)
        c = tl.load(rows_PSC + offset + latent[None, :], mask=(latent < L)[None, :], other=0.0)
        k = tl.load(rows_PSC + offset + (L + turned)[None, :], mask=(turned < F)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(c), input_precision="ieee")
        score = tl.dot(q_turned, tl.trans(k), score, input_precision="ieee")
        if block * BN + BN - 1 > first_position:  # only blocks at the diagonal
            score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * fade[:, None], input_precision="ieee")
        peak = higher

    acc /= tl.where(total == 0, 1.0, total)[:, None]
    # Computed again from a value that is loaded again: kept, it would take registers from the loop.
    begin = tl.load(query_start_R + r, volatile=True)
    row = (b - r - begin * H // BM) * BM + tl.arange(0, BM)
    out_ptr = out_THL + (begin.to(tl.int64) * H + row)[:, None] * L + latent[None, :]
    tl.store(out_ptr, acc.to(out_THL.dtype.element_ty), mask=(row < num_rows)[:, None] & (latent < L)[None, :])
