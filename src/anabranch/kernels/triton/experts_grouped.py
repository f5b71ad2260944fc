"""Experts as two grouped matrix products: tiles of rows that share an expert, against that expert's weights.

T tokens, D hidden width, K experts per token, E experts, I expert width (`inner`), F = 2 · I, N = T · K pairs, M tiles.

One program computes a tile of rows × columns. The gate/up product takes the gate rows and the up rows of the same
columns as one operand, so that the activation happens in registers; rows of x are gathered as they are loaded. The
down product multiplies by the router weight and writes each row to its pair, or adds it to its token (`ADD`).

experts_plan gives each tile its rows. With `MATCH` and at most BM tokens it is not needed: tile e is expert e (with
`BY_PAIR`, tile p is the expert of pair p, and all but the first tile of an expert do nothing), its rows
are all tokens, and the rows of tokens that did not choose e are computed but not stored.

`SWAP` makes the weights the left operand: few rows are then the narrow side of the matrix unit, not the wide one.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.gated import activate
from anabranch.kernels.triton.launch import wait_for_predecessor
from anabranch.kernels.triton.quantized import scaled_product


@triton.jit
def tile_of_program(max_tiles, num_blocks, GROUP: tl.constexpr):
    """(tile, column block): GROUP tiles go through all column blocks before the next GROUP, tiles fastest."""
    program = tl.program_id(0)
    group = program // (GROUP * num_blocks)
    within = program % (GROUP * num_blocks)
    tiles = tl.minimum(max_tiles - group * GROUP, GROUP)
    return group * GROUP + within % tiles, within // tiles


@triton.jit
def rows_of_tile(
    expert_TK, order_N, tile_3M, max_tiles, num_pairs, tile, K, KP, BM: tl.constexpr, MATCH: tl.constexpr,
    BY_PAIR: tl.constexpr,
):  # fmt: skip
    """(expert or −1, rows of h, pair of each row, which rows are real)."""
    r = tl.arange(0, BM)
    if MATCH:
        k = tl.arange(0, KP)
        pairs = r[:, None] * K + k[None, :]
        chosen = tl.load(expert_TK + pairs, mask=(k[None, :] < K) & (pairs < num_pairs), other=-1)
        expert = tile
        if BY_PAIR:
            expert = tl.load(expert_TK + tile)
        slot = tl.min(tl.where(chosen == expert, k[None, :], KP), 1)
        real = slot < KP
        pair = r * K + slot
        row = pair
        if BY_PAIR:  # the first pair of an expert computes the rows of all
            expert = tl.where(tl.min(tl.where(real, pair, num_pairs), 0) == tile, expert, -1)
        else:
            expert = tl.where(tl.max(real.to(tl.int32), 0) > 0, tile, -1)
    else:
        expert = tl.load(tile_3M + tile)
        row = tl.load(tile_3M + max_tiles + tile) + r
        real = row < tl.load(tile_3M + 2 * max_tiles + tile)
        pair = tl.load(order_N + row, mask=real & (expert >= 0), other=0)
    return expert, row, pair, real


@triton.jit
def product(
    a_ptr, a_real, b_ptr, depth,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SWAP: tl.constexpr, b_stride=1,
):  # fmt: skip
    """Σ over depth of a_rows · b_rowsᵀ in fp32: [BM, BN], or with SWAP its transpose. Pointers are to column 0;
    `b_stride`: from one to the next."""
    d = tl.arange(0, BK)
    a_ptr += d[None, :]
    b_ptr += d[None, :] * b_stride
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for begin in range(0, depth, BK):
        if EVEN:
            a = tl.load(a_ptr, mask=a_real[:, None], other=0.0)
            b = tl.load(b_ptr)
        else:
            inside = (begin + d < depth)[None, :]
            a = tl.load(a_ptr, mask=a_real[:, None] & inside, other=0.0)
            b = tl.load(b_ptr, mask=inside, other=0.0)
        if SWAP:
            acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
        else:
            acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
        a_ptr += BK
        b_ptr += BK * b_stride
    return acc


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def gate_up_grouped(
    x_TD, x_stride, expert_TK, gate_up_EFD, scale, zero, bias_EF, h_NI, order_N, tile_3M, max_tiles, num_pairs, D,
    inner, num_groups,
    K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, MATCH: tl.constexpr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
    KIND: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BY_PAIR: tl.constexpr,
):  # fmt: skip
    """h[row, columns] = activation(gate · x) · (up · x) of one tile and BN columns."""
    wait_for_predecessor(DEPENDENT)
    tile, block = tile_of_program(max_tiles, tl.cdiv(inner, BN), GROUP)
    expert, row, pair, real = rows_of_tile(
        expert_TK, order_N, tile_3M, max_tiles, num_pairs, tile, K, KP, BM, MATCH, BY_PAIR
    )
    if expert < 0:
        return
    f = tl.arange(0, 2 * BN)
    # Columns after the last one repeat it and are not stored.
    weight_row = tl.where(f < BN, 0, inner) + tl.minimum(block * BN + f % BN, inner - 1)
    a_ptr = x_TD + (pair // K).to(tl.int64)[:, None] * x_stride
    e = expert.to(tl.int64)
    if KIND != "":
        width = D // 2 if SPAN > 1 else D
        b_ptr = gate_up_EFD + e * (2 * inner * width) + weight_row[:, None] * width
        scale_row = (e * tl.cdiv(2 * inner, OUTPUTS) + weight_row // OUTPUTS) * num_groups
        zero_row = (e * (2 * inner) + weight_row) * num_groups
        acc = scaled_product(
            a_ptr, real, b_ptr, scale, zero, scale_row, zero_row, D, BM, 2 * BN, BK, EVEN, SWAP, KIND, INPUTS, DEPENDENT
        )
    else:
        b_ptr = gate_up_EFD + e * (2 * inner * D) + weight_row[:, None] * D
        acc = product(a_ptr, real, b_ptr, D, BM, 2 * BN, BK, EVEN, SWAP)
    if bias_EF is not None:
        acc += tl.expand_dims(tl.load(bias_EF + expert * (2 * inner) + weight_row).to(tl.float32), 1 if SWAP else 0)
    if SWAP:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN, BM)), (1, 2, 0)))
        h = tl.trans(activate(gate, up, ACTIVATION).to(h_NI.dtype.element_ty))
    else:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
        h = activate(gate, up, ACTIVATION).to(h_NI.dtype.element_ty)
    column = block * BN + tl.arange(0, BN)
    mask = real[:, None] & (column < inner)[None, :]
    tl.store(h_NI + row.to(tl.int64)[:, None] * inner + column[None, :], h, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def down_grouped(
    weight_TK, weight_N, expert_TK, h_NI, down_EDI, scale, zero, bias_ED, out, order_N, tile_3M,
    max_tiles, num_pairs, scaling, D, inner, num_groups,
    K: tl.constexpr, KP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SWAP: tl.constexpr, MATCH: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr, DEPENDENT: tl.constexpr,
    KIND: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BY_PAIR: tl.constexpr,
):  # fmt: skip
    """rows[pair, columns] = weight · (down · h), or with ADD its fp32 sum into y[token, columns]."""
    wait_for_predecessor(DEPENDENT)
    tile, block = tile_of_program(max_tiles, tl.cdiv(D, BN), GROUP)
    expert, row, pair, real = rows_of_tile(
        expert_TK, order_N, tile_3M, max_tiles, num_pairs, tile, K, KP, BM, MATCH, BY_PAIR
    )
    if expert < 0:
        return
    column = block * BN + tl.arange(0, BN)
    weight_row = tl.minimum(column, D - 1)
    a_ptr = h_NI + row.to(tl.int64)[:, None] * inner
    e = expert.to(tl.int64)
    if KIND != "":
        width = inner // 2 if SPAN > 1 else inner
        b_ptr = down_EDI + e * (D * width) + weight_row[:, None] * width
        scale_row = (e * tl.cdiv(D, OUTPUTS) + weight_row // OUTPUTS) * num_groups
        zero_row = (e * D + weight_row) * num_groups
        acc = scaled_product(
            a_ptr, real, b_ptr, scale, zero, scale_row, zero_row, inner, BM, BN, BK, EVEN, SWAP, KIND, INPUTS, DEPENDENT
        )
    else:
        b_ptr = down_EDI + e * (D * inner) + weight_row[:, None] * inner
        acc = product(a_ptr, real, b_ptr, inner, BM, BN, BK, EVEN, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    if bias_ED is not None:
        acc += tl.load(bias_ED + expert * D + weight_row).to(tl.float32)[None, :]
    inside = (column < D)[None, :]
    if MATCH:
        # A token that names an expert twice gets one row with both weights: see FIRST of sum_rows.
        k = tl.arange(0, KP)[None, :]
        pairs = tl.arange(0, BM)[:, None] * K + k
        mine = (k < K) & (pairs < num_pairs)
        mine = mine & (tl.load(expert_TK + pairs, mask=mine, other=-1) == expert)
        weight = tl.sum(tl.load(weight_TK + pairs, mask=mine, other=0.0), 1) * scaling
    else:
        weight = tl.load(weight_N + row, mask=real, other=0.0)
    acc *= weight[:, None]
    mask = real[:, None] & inside
    if ADD:
        pointer = out + (pair // K).to(tl.int64)[:, None] * D + column[None, :]
        tl.atomic_add(pointer, acc, mask=mask, sem="relaxed")
    else:
        pointer = out + pair.to(tl.int64)[:, None] * D + column[None, :]
        tl.store(pointer, acc.to(out.dtype.element_ty), mask=mask)
