"""Paged attention for requests with one new token: the keys of a request are split among programs.

T token rows, R requests, H query heads, G key-value heads (HG = H / G heads share one), D head dim, S slots in a page,
M page-table width, W pieces of work, BN keys in a block. RP and DP are R and D rounded up, ROWS is HG rounded up.

A program has one piece of work: some blocks of keys of one request, for one key-value head and all query heads that
share it. Every program computes the size of a piece from all lengths, on the device, so that a captured launch adapts
to growing contexts and one long request does not delay the others. The host knows W, which is more than R where
requests may be split, but no lengths. With few requests, the pieces of a request are consecutive; otherwise piece r < R
is the first of request r, and further pieces come after all first ones.

A request of a single piece is complete when its program ends. Otherwise each piece stores its output and the logarithm
of its weight, and increments a counter; the last one adds all pieces in order, so that the bits do not depend on which
is last, and resets the counter for the next launch. So launches on a device must not overlap.

On Hopper a kernel starts before its predecessor has finished (`DEPENDENT`) and finds its work meanwhile: lengths,
starts and page table must have been written before the predecessor, which usually writes keys. They are read past L1,
which may hold those of the previous step. Every program waits, also one without work: the successor relies on it.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.launch import prefetch, wait_for_predecessor

LOWEST = tl.constexpr(-1.0e30)
"""Below every score, but finite: the difference of two is 0 and not NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)
FEW_REQUESTS = tl.constexpr(32)
"""Up to this number of requests, reading all of them first is faster."""


@triton.jit
def share_out(
    query_start_R, context_len_R, num_requests, num_pieces, window,
    RP: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """(blocks of keys of every request, most blocks of a piece). Requests without exactly one new token have no blocks.

    There are never too many pieces of that size: ⌈b / size⌉ − 1 < b / size, and Σ b / size is at most the number of
    pieces that remain after the first one of each request.
    """
    r = tl.arange(0, RP)
    start, end, length = load_request(query_start_R, context_len_R, r, r < num_requests)
    blocks = tl.cdiv(length, BN)
    if WINDOWED:
        blocks -= tl.maximum(length - window, 0) // BN
    blocks = tl.where(end - start == 1, blocks, 0)
    return blocks, tl.maximum(tl.cdiv(tl.sum(blocks, 0), num_pieces - num_requests), 1)


@triton.jit
def further_pieces(blocks_R, size):
    """The number of pieces of every request after its first."""
    return tl.maximum(tl.cdiv(blocks_R, size) - 1, 0)


@triton.jit
def load_request(query_start_R, context_len_R, r, real):
    """(first row, first row of the next request, context length)"""
    row = tl.load(query_start_R + r, mask=real, other=0, cache_modifier=".cg")
    next_row = tl.load(query_start_R + r + 1, mask=real, other=0, cache_modifier=".cg")
    return row, next_row, tl.load(context_len_R + r, mask=real, other=0, cache_modifier=".cg")


@triton.jit
def first_pages(page_table_RM, r, table_stride, begin, first_key, length, S: tl.constexpr, BN: tl.constexpr):
    """Pages and slots of the keys of block `begin`. Slots without a key of the request may contain anything: its first
    or last key is read instead."""
    key = begin * BN + tl.arange(0, BN)
    inside = tl.maximum(tl.minimum(tl.maximum(key, first_key), length - 1), 0)
    there = (key >= 0) & (length > 0)
    page = tl.load(page_table_RM + r * table_stride + inside // S, mask=there, other=0, cache_modifier=".cg")
    return page, inside % S


@triton.jit
def count_piece(count, w, piece, pieces):
    """(whether this is the last piece of its request to end, the place of the second piece). What the others have
    stored is visible to the last one.

    The low half of the count is the number of pieces that ended. The second piece, which knows its place, adds it in
    the high half: a first piece does not know how many pieces of other requests come before."""
    mine = 1 + tl.where(piece == 1, w << 16, 0)
    tl.debug_barrier()  # one thread counts for all, after all have stored
    counted = mine + tl.atomic_add(count, mine, sem="acq_rel", scope="gpu")
    return (counted & 0xFFFF) == pieces, counted >> 16


@triton.jit
def load_weights(
    weight_WH, num_heads, start, pieces, first_place, second_place,
    HG: tl.constexpr, HEADS: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    """Weights of NUM pieces from `start` on, past L1, which may hold older values."""
    head, piece = tl.arange(0, HEADS), start + tl.arange(0, NUM)
    place = tl.where(piece == 0, first_place, second_place + piece - 1)
    mask = (head < HG)[:, None] & (piece < pieces)[None, :]
    pointer = weight_WH + (place * num_heads)[None, :] + head[:, None]
    return tl.load(pointer, mask=mask, other=LOWEST, cache_modifier=".cg")


@triton.jit
def load_pieces(
    piece_WHD, num_heads, start, pieces, first_place, second_place,
    HG: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NUM: tl.constexpr,
):  # fmt: skip
    head, piece, d = tl.arange(0, HEADS), start + tl.arange(0, NUM), tl.arange(0, DP)
    place = tl.where(piece == 0, first_place, second_place + piece - 1).to(tl.int64)
    mask = ((head < HG)[:, None] & (piece < pieces)[None, :])[:, :, None] & (d < D)[None, None, :]
    pointer = piece_WHD + (place * (num_heads * D))[None, :, None] + head[:, None, None] * D + d[None, None, :]
    return tl.load(pointer, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def add_up(
    piece_WHD, weight_WH, num_heads, pieces, first_place, second_place,
    HG: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The sum of all pieces of a request, for the first HG heads; HEADS is HG rounded up. The first AT_ONCE are loaded
    together: often there are no more."""
    weight = load_weights(weight_WH, num_heads, 0, pieces, first_place, second_place, HG, HEADS, AT_ONCE)
    o = load_pieces(piece_WHD, num_heads, 0, pieces, first_place, second_place, HG, HEADS, D, DP, AT_ONCE)
    peak = tl.max(weight, 1)
    total = tl.sum(tl.exp2(weight - peak[:, None]), 1)
    MORE: tl.constexpr = 32 if HEADS >= 4 else 128 // HEADS  # one for each thread: fewer would be loaded twice
    for start in range(AT_ONCE, pieces, MORE):
        more = load_weights(weight_WH, num_heads, start, pieces, first_place, second_place, HG, HEADS, MORE)
        higher = tl.maximum(peak, tl.max(more, 1))
        total = total * tl.exp2(peak - higher) + tl.sum(tl.exp2(more - higher[:, None]), 1)
        peak = higher
    # The peak is computed before the sum: a running one is needed in two layouts, and the compiler would load all
    # weights once for each.
    acc = tl.zeros([HEADS, DP], tl.float32)
    for start in range(AT_ONCE, pieces + AT_ONCE, AT_ONCE):
        acc += tl.sum(tl.exp2(weight - peak[:, None])[:, :, None] * o, 1)
        if start < pieces:
            weight = load_weights(weight_WH, num_heads, start, pieces, first_place, second_place, HG, HEADS, AT_ONCE)
            o = load_pieces(piece_WHD, num_heads, start, pieces, first_place, second_place, HG, HEADS, D, DP, AT_ONCE)
    return acc * (1.0 / total)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "scale", "window", "table_stride", "trigger"])
def attend_pieces(
    q_THD, k_PSGD, v_PSGD, page_table_RM, query_start_R, context_len_R, out_THD, piece_WHD, weight_WH, count_RG,
    num_tokens, num_requests, scale, window,
    q_stride, q_head_stride, page_stride, slot_stride, head_stride, table_stride, trigger, v_scale, sink_H,
    HG: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, S: tl.constexpr, BN: tl.constexpr,
    RP: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr, SWAP: tl.constexpr,
    WINDOWED: tl.constexpr, FETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores times `scale` are base-2 logarithms. Not SPLIT: piece w is all of request w. SWAP: keys are the rows of
    the products. FETCH: prefetch the first keys and values to L2 before the wait. HEADS, AT_ONCE: see `add_up`. With a
    `v_scale`, pages are FP8, and values are this times what they hold. With `sink_H`, the first piece of a request
    begins with one more score of each head."""
    KEY: tl.constexpr = 0 if SWAP else 1  # the axis of keys; the other is that of heads
    HEAD: tl.constexpr = 1 - KEY
    g, w = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0) * HG
    FEW: tl.constexpr = SPLIT and RP <= FEW_REQUESTS
    num_pieces = tl.num_programs(1)
    r, piece, pieces = w, w * 0, w * 0 + 1
    if FEW:
        blocks_R, size = share_out(query_start_R, context_len_R, num_requests, num_pieces, window, RP, BN, WINDOWED)
        pieces_R = tl.where(tl.arange(0, RP) < num_requests, 1 + further_pieces(blocks_R, size), 0)
        past_R = tl.cumsum(pieces_R, 0) <= w
        r = tl.sum(past_R.to(tl.int32), 0)
        piece = w - tl.sum(tl.where(past_R, pieces_R, 0), 0)
        pieces = tl.maximum(tl.sum(tl.where(tl.arange(0, RP) == r, pieces_R, 0), 0), 1)
    # With many requests, the first pieces come first: those programs know their request and load its pages at once.
    row, next_row, length = load_request(query_start_R, context_len_R, r, r < num_requests)
    first_key = tl.maximum(length - window, 0) if WINDOWED else length * 0
    blocks = tl.cdiv(length, BN) - first_key // BN
    begin = first_key // BN + blocks * piece // pieces
    page, slot = first_pages(page_table_RM, r, table_stride, begin, first_key, length, S, BN)
    padding_row = tl.load(query_start_R + num_requests, cache_modifier=".cg")
    if SPLIT and not FEW:
        blocks_R, size = share_out(query_start_R, context_len_R, num_requests, num_pieces, window, RP, BN, WINDOWED)
        if w >= num_requests:
            further_R = further_pieces(blocks_R, size)
            past_R = tl.cumsum(further_R, 0) <= w - num_requests
            r = tl.sum(past_R.to(tl.int32), 0)
            piece = w - num_requests - tl.sum(tl.where(past_R, further_R, 0), 0) + 1
            row, next_row, length = load_request(query_start_R, context_len_R, r, r < num_requests)
            first_key = tl.maximum(length - window, 0) if WINDOWED else length * 0
            blocks = tl.cdiv(length, BN) - first_key // BN
        pieces = tl.maximum(tl.cdiv(blocks, size), 1)
        if w >= num_requests:
            begin = first_key // BN + blocks * piece // pieces
            page, slot = first_pages(page_table_RM, r, table_stride, begin, first_key, length, S, BN)
    end = first_key // BN + blocks * (piece + 1) // pieces
    table = page_table_RM + r * table_stride
    if FETCH:
        LINE: tl.constexpr = 1024 // k_PSGD.dtype.element_ty.primitive_bitwidth  # 128 bytes
        line = tl.arange(0, DP // LINE) * LINE
        lines = (page.to(tl.int64) * page_stride + slot * slot_stride)[:, None] + line[None, :]
        prefetch((k_PSGD + g * head_stride + lines).to(tl.int64))
        prefetch((v_PSGD + g * head_stride + lines).to(tl.int64))
    wait_for_predecessor(DEPENDENT, trigger=trigger)

    head, d = tl.arange(0, ROWS), tl.arange(0, DP)
    is_head = (head < HG)[:, None] & (d < D)[None, :]
    within = (g * HG + head)[:, None] * D + d[None, :]
    for t in range(padding_row + w, num_tokens, tl.num_programs(1)):
        zeros = tl.zeros([ROWS, DP], out_THD.dtype.element_ty)
        tl.store(out_THD + tl.cast(t, tl.int64) * (num_heads * D) + within, zeros, mask=is_head)
    if next_row - row != 1:
        return

    q_ptr = q_THD + row.to(tl.int64) * q_stride + (g * HG + head)[:, None] * q_head_stride + d[None, :]
    q = tl.load(q_ptr, mask=is_head, other=0.0)
    k_ptr = k_PSGD + g * head_stride + d[None, :]
    v_ptr = v_PSGD + g * head_stride + d[None, :]
    peak = tl.full([ROWS], LOWEST, tl.float32)
    acc = tl.zeros([DP, ROWS] if SWAP else [ROWS, DP], tl.float32)
    total = tl.zeros([BN, ROWS] if SWAP else [ROWS, BN], tl.float32)
    if sink_H is not None:
        sink = tl.load(sink_H + g * HG + head, mask=head < HG, other=0.0).to(tl.float32)
        peak = tl.where(piece == 0, sink * LOG2_E, peak)
        total += tl.expand_dims(((tl.arange(0, BN) == 0) & (piece == 0)).to(tl.float32), HEAD)
    for block in range(begin, end):
        key = block * BN + tl.arange(0, BN)
        inside = tl.minimum(tl.maximum(key, first_key), length - 1)
        offset = (page.to(tl.int64) * page_stride + (inside % S) * slot_stride)[:, None]
        # One block ahead: the page must be known before its keys can be loaded.
        page = tl.load(table + tl.minimum(tl.maximum(key + BN, first_key), length - 1) // S)
        k = tl.load(k_ptr + offset, mask=(d < D)[None, :], other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offset, mask=(d < D)[None, :], other=0.0).to(q.dtype)
        if SWAP:
            score = tl.dot(k, tl.trans(q), input_precision="ieee")
        else:
            score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.where(tl.expand_dims(key == inside, HEAD), score * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, KEY))
        p = tl.exp2(score - tl.expand_dims(higher, KEY))
        fade = tl.expand_dims(tl.exp2(peak - higher), KEY)
        total = total * fade + p
        acc *= fade
        if SWAP:
            acc = tl.dot(tl.trans(v), p.to(v.dtype), acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        peak = higher

    sum_H = tl.sum(total, KEY)
    acc /= tl.expand_dims(tl.where(sum_H == 0, 1.0, sum_H), KEY)  # without context: zeros
    if v_scale is not None:
        acc *= v_scale
    if SWAP:
        acc = tl.trans(acc)
    out_HD = out_THD + row.to(tl.int64) * (num_heads * D)
    if pieces == 1:
        tl.store(out_HD + within, acc.to(out_THD.dtype.element_ty), mask=is_head)
    elif SPLIT:
        tl.store(piece_WHD + w.to(tl.int64) * (num_heads * D) + within, acc, mask=is_head)
        tl.store(weight_WH + w * num_heads + g * HG + head, peak + tl.log2(sum_H), mask=head < HG)
        count = count_RG + r * tl.num_programs(0) + g
        last, second_place = count_piece(count, w, piece, pieces)
        if last:
            tl.store(count, 0)
            first_place = second_place - 1 if FEW else r
            sum_HD = add_up(
                piece_WHD + g * HG * D, weight_WH + g * HG, num_heads, pieces, first_place, second_place,
                HG, HEADS, D, DP, AT_ONCE,
            )  # fmt: skip
            own = tl.arange(0, HEADS)
            pointer = out_HD + (g * HG + own)[:, None] * D + d[None, :]
            tl.store(pointer, sum_HD.to(out_HD.dtype.element_ty), mask=(own < HG)[:, None] & (d < D)[None, :])
