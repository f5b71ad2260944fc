"""Paged attention for requests with several new tokens: blocks of rows, each against all keys that it sees.

T token rows, R requests, H query heads, G key-value heads (HG = H / G heads share one), D head dim, E that of values, S
slots in a page, M page-table width; BM rows of a program, BN keys in a block. RP, DP and EP are R + 1, D and E rounded
up; a D of 192 is DP = 128 and DT = 64 instead.

A row is a token and one of the HG heads that share keys: row i of a request is head i % HG of its token i // HG, so
that a program reads keys once for all of them. The rows of a request are split into blocks of BM. The host knows only
the upper bound T · HG // BM + R + 1 of their number; a program finds its request by counting the starts before it. Rows
after the last request (padding) are one more request, without keys. Blocks with the most keys come first.

On Hopper the kernel starts before its predecessor has finished (`DEPENDENT`) and finds its request meanwhile, like
attention_decode and under the same condition.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.attention_decode import LOG2_E, LOWEST
from anabranch.kernels.triton.launch import wait_for_predecessor


@triton.jit
def find_rows(
    query_start_R, context_len_R, num_requests, num_tokens, trigger, i, b,
    HG: tl.constexpr, BM: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """(request, its first token, number of tokens and of rows, context length, first row) of block b; i is 0 .. RP."""
    start = tl.load(query_start_R + i, mask=i <= num_requests, other=0, cache_modifier=".cg")
    r = tl.sum(((i <= num_requests) & (start * HG // BM + i <= b)).to(tl.int32), 0) - 1
    real = r < num_requests
    begin = tl.load(query_start_R + r, cache_modifier=".cg")
    end = tl.load(query_start_R + r + 1, mask=real, other=num_tokens, cache_modifier=".cg")
    length = tl.load(context_len_R + r, mask=real, other=0, cache_modifier=".cg")
    wait_for_predecessor(DEPENDENT, trigger=trigger)
    num_queries = end - begin
    return r, begin, num_queries, num_queries * HG, length, (b - r - begin * HG // BM) * BM


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "scale", "window", "table_stride", "trigger", "alone"])
def attend_rows(
    q_THD, k_PSGD, v_PSGE, page_table_RM, query_start_R, context_len_R, out_THE,
    num_tokens, num_requests, scale, window,
    q_stride, q_head_stride, page_stride, slot_stride, head_stride, table_stride, trigger, alone, v_scale, sink_H,
    HG: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RP: tl.constexpr, WINDOWED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores times `scale` are base-2 logarithms. Requests with one new token are skipped unless `alone`. With
    a `v_scale`, pages are FP8, and values are this times what they hold. With `sink_H`, every row has one more score,
    its head's."""
    g, b = tl.program_id(0), tl.num_programs(1) - 1 - tl.program_id(1)
    num_heads = tl.num_programs(0) * HG
    r, begin, num_queries, num_rows, length, first_row = find_rows(
        query_start_R, context_len_R, num_requests, num_tokens, trigger, tl.arange(0, RP), b, HG, BM, DEPENDENT
    )
    if first_row >= num_rows:
        return
    if (r < num_requests) & (num_queries == 1) & (alone == 0):
        return

    row, d, e = first_row + tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, EP)
    token, head = (begin + row // HG).to(tl.int64), g * HG + row % HG
    is_row = (row < num_rows)[:, None]
    if r == num_requests:
        out_ptr = out_THE + (token * num_heads + head)[:, None] * E + e[None, :]
        tl.store(out_ptr, tl.zeros([BM, EP], out_THE.dtype.element_ty), mask=is_row & (e < E)[None, :])
        return
    q_ptr = q_THD + (token * q_stride + head * q_head_stride)[:, None]
    q = tl.load(q_ptr + d[None, :], mask=is_row & (d < D)[None, :], other=0.0)
    if DT:
        tail = DP + tl.arange(0, DT)
        q_tail = tl.load(q_ptr + tail[None, :], mask=is_row, other=0.0)
    position = length - num_queries + row // HG
    first_position = length - num_queries + first_row // HG
    last_position = tl.minimum(length - num_queries + (first_row + BM - 1) // HG, length - 1)
    first_key = tl.maximum(first_position - window + 1, 0) if WINDOWED else 0
    first_block = first_key // BN
    table = page_table_RM + r * table_stride
    k_ptr = k_PSGD + g * head_stride + d[None, :]
    v_ptr = v_PSGE + g * head_stride + e[None, :]
    # Slots without a key of the request may contain anything: a key that some row sees is read instead.
    inside = tl.minimum(tl.maximum(first_block * BN + tl.arange(0, BN), first_key), last_position)
    page = tl.load(table + inside // S, mask=inside >= 0, other=0)
    peak = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    if sink_H is not None:
        peak = tl.load(sink_H + head, mask=row < num_rows, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    for block in range(first_block, (last_position + BN) // BN):
        key = block * BN + tl.arange(0, BN)
        inside = tl.minimum(tl.maximum(key, first_key), last_position)
        offset = (page.to(tl.int64) * page_stride + (inside % S) * slot_stride)[:, None]
        # One block ahead: the page must be known before its keys can be loaded.
        page = tl.load(table + tl.minimum(key + BN, last_position) // S)
        k = tl.load(k_ptr + offset, mask=(d < D)[None, :], other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if DT:
            k_tail = tl.load(k_PSGD + g * head_stride + tail[None, :] + offset).to(q.dtype)
            score = tl.dot(q_tail, tl.trans(k_tail), score, input_precision="ieee")
        cut = block * BN + BN - 1 > first_position
        if WINDOWED:
            cut |= block * BN <= last_position - window
        if cut:  # only blocks at the diagonal and at the far end of the window
            visible = key[None, :] <= position[:, None]
            if WINDOWED:
                visible &= key[None, :] > position[:, None] - window
            score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        p = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(p, 1)
        acc *= fade[:, None]
        v = tl.load(v_ptr + offset, mask=(e < E)[None, :], other=0.0).to(q.dtype)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        peak = higher

    acc /= tl.where(total == 0, 1.0, total)[:, None]  # rows that see nothing: zeros
    if v_scale is not None:
        acc *= v_scale
    # Computed again from a value that is loaded again: kept, it would take registers from the loop.
    row = (b - r - tl.load(query_start_R + r, volatile=True) * HG // BM) * BM + tl.arange(0, BM)
    token, head = (begin + row // HG).to(tl.int64), g * HG + row % HG
    out_ptr = out_THE + (token * num_heads + head)[:, None] * E + e[None, :]
    tl.store(out_ptr, acc.to(out_THE.dtype.element_ty), mask=(row < num_rows)[:, None] & (e < E)[None, :])
