"""Attention over latent rows for requests with one new token: the rows of a request are split among programs.

T token rows, R requests, H query heads, HG of them in a program, L latent dims, F dims that have turned, S slots in a
page, M page-table width, W pieces of work, BN rows in a block. LP, FP, RP are L, F, R rounded up, ROWS is HG rounded
up.

As attention_decode, whose way to share out work and to add up pieces this is, but for two things: heads of all programs
read the same rows, and a block is read once, as keys (the latent part, and the part that has turned) and as values (the
latent part again).
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.attention_decode import (
    FEW_REQUESTS,
    LOWEST,
    add_up,
    count_piece,
    first_pages,
    further_pieces,
    load_request,
    share_out,
)
from anabranch.kernels.triton.launch import wait_for_predecessor


@triton.jit
def find_piece(
    query_start_R, context_len_R, num_requests, num_pieces, w, HG: tl.constexpr, RP: tl.constexpr, BN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """(request, which of its pieces, how many it has) of piece w of all. With few requests, the pieces of one are
    consecutive; otherwise first pieces come before all others.

    One program adds up the pieces of a request, for 16 heads in about half the time that another needs for a block of
    rows. So of b blocks √(b · HG / 32) or more are a piece: fewer would make that sum the longest part.
    """
    r, piece, pieces = w, w * 0, w * 0 + 1
    if SPLIT:
        request = tl.arange(0, RP)
        blocks_R, size = share_out(query_start_R, context_len_R, num_requests, num_pieces, 0, RP, BN, False)
        longest = tl.max(blocks_R, 0).to(tl.float32)
        size = tl.maximum(size, tl.ceil(tl.sqrt(longest * (HG / 32))).to(tl.int32))
        # Up to 7/24 more blocks a piece, if all then run at a time: those that would wait take nearly as long again.
        longer_8 = size + tl.cdiv(size * tl.arange(0, 8), 24)
        fits_8 = tl.sum(tl.cdiv(blocks_R[None, :], longer_8[:, None]), 1) <= num_pieces - num_requests
        best = tl.min(tl.where(fits_8, longer_8, 2 * size), 0)
        size = tl.where(best < 2 * size, best, size)
        further_R = further_pieces(blocks_R, size)
        if RP <= FEW_REQUESTS:
            pieces_R = tl.where(request < num_requests, 1 + further_R, 0)
            past_R = tl.cumsum(pieces_R, 0) <= w
            r = tl.sum(past_R.to(tl.int32), 0)
            piece = w - tl.sum(tl.where(past_R, pieces_R, 0), 0)
        elif w >= num_requests:
            past_R = tl.cumsum(further_R, 0) <= w - num_requests
            r = tl.sum(past_R.to(tl.int32), 0)
            piece = w - num_requests - tl.sum(tl.where(past_R, further_R, 0), 0) + 1
        pieces = 1 + tl.sum(tl.where(request == r, further_R, 0), 0)
    return r, piece, pieces


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "scale", "table_stride", "trigger"])
def attend_latent_pieces(
    q_THL, q_turned_THF, rows_PSC, page_table_RM, query_start_R, context_len_R, out_THL, piece_WHL, weight_WH, count_RG,
    num_tokens, num_requests, scale,
    q_stride, q_head_stride, turned_stride, turned_head_stride, page_stride, table_stride, trigger,
    HG: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, F: tl.constexpr, FP: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr, RP: tl.constexpr, SPLIT: tl.constexpr, SUM: tl.constexpr,
    AT_ONCE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Scores times `scale` are base-2 logarithms. Not SPLIT: piece w is all of request w. SUM: heads
    whose pieces are added up together; AT_ONCE: see `add_up`."""
    g, w = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0) * HG
    r, piece, pieces = find_piece(
        query_start_R, context_len_R, num_requests, tl.num_programs(1), w, HG, RP, BN, SPLIT
    )  # fmt: skip
    row, next_row, length = load_request(query_start_R, context_len_R, r, r < num_requests)
    blocks = tl.cdiv(length, BN)
    begin, end = blocks * piece // pieces, blocks * (piece + 1) // pieces
    page, _ = first_pages(page_table_RM, r, table_stride, begin, 0, length, S, BN)
    padding_row = tl.load(query_start_R + num_requests, cache_modifier=".cg")
    wait_for_predecessor(DEPENDENT, trigger=trigger)

    head, latent, turned = tl.arange(0, ROWS), tl.arange(0, LP), tl.arange(0, FP)
    is_head = (head < HG)[:, None] & (latent < L)[None, :]
    within = (g * HG + head)[:, None] * L + latent[None, :]
    for t in range(padding_row + w, num_tokens, tl.num_programs(1)):
        zeros = tl.zeros([ROWS, LP], out_THL.dtype.element_ty)
        tl.store(out_THL + tl.cast(t, tl.int64) * (num_heads * L) + within, zeros, mask=is_head)
    if next_row - row != 1:
        return

    q_ptr = q_THL + row.to(tl.int64) * q_stride + (g * HG + head)[:, None].to(tl.int64) * q_head_stride
    q = tl.load(q_ptr + latent[None, :], mask=is_head, other=0.0)
    turned_ptr = q_turned_THF + row.to(tl.int64) * turned_stride + (g * HG + head)[:, None] * turned_head_stride
    q_turned = tl.load(
        turned_ptr + turned[None, :], mask=(head < HG)[:, None] & (turned < F)[None, :], other=0.0
    )  # fmt: skip
    table = page_table_RM + r * table_stride
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LP], tl.float32)
    for block in range(begin, end):
        key = block * BN + tl.arange(0, BN)
        inside = tl.minimum(key, length - 1)
        offset = (page.to(tl.int64) * page_stride + (inside % S) * (L + F))[:, None]
        # One block ahead: the page must be known before its rows can be loaded.
        page = tl.load(table + tl.minimum(key + BN, length - 1) // S)
        c = tl.load(rows_PSC + offset + latent[None, :], mask=(latent < L)[None, :], other=0.0)
        k = tl.load(rows_PSC + offset + (L + turned)[None, :], mask=(turned < F)[None, :], other=0.0)
        score = tl.dot(q, tl.trans(c), input_precision="ieee")
        score = tl.dot(q_turned, tl.trans(k), score, input_precision="ieee")
        score = tl.where((key == inside)[None, :], score * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        p = tl.exp2(score - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(c.dtype), c, acc * fade[:, None], input_precision="ieee")
        peak = higher

    acc /= tl.where(total == 0, 1.0, total)[:, None]  # without context: zeros
    out_HL = out_THL + row.to(tl.int64) * (num_heads * L)
    if pieces == 1:
        tl.store(out_HL + within, acc.to(out_THL.dtype.element_ty), mask=is_head)
    elif SPLIT:
        tl.store(piece_WHL + w.to(tl.int64) * (num_heads * L) + within, acc, mask=is_head)
        tl.store(weight_WH + w * num_heads + g * HG + head, peak + tl.log2(total), mask=head < HG)
        count = count_RG + r * tl.num_programs(0) + g
        last, second_place = count_piece(count, w, piece, pieces)
        if last:
            tl.store(count, 0)
            first_place = second_place - 1 if RP <= FEW_REQUESTS else r
            for first in tl.static_range(0, HG, SUM):  # all at once would not fit into registers
                sum_HL = add_up(
                    piece_WHL + (g * HG + first) * L, weight_WH + g * HG + first, num_heads, pieces, first_place,
                    second_place, min(SUM, HG - first), SUM, L, LP, AT_ONCE,
                )  # fmt: skip
                own = tl.arange(0, SUM)
                pointer = out_HL + (g * HG + first + own)[:, None] * L + latent[None, :]
                mask = (first + own < HG)[:, None] & (latent < L)[None, :]
                tl.store(pointer, sum_HL.to(out_THL.dtype.element_ty), mask=mask)
