"""Experts for a few tokens: two kernels that stream weights, without sort, padding or scatter.

T tokens, D hidden width, K experts per token, I expert width (`inner`), F = 2 · I, pair p = t · K + k.

So few rows do not fill the matrix units, so these are matrix-vector products on ordinary cores: a program has a few
weight rows and issues all their loads (16 bytes a thread) at once. They are limited by the bytes in flight, not by
arithmetic. `down_token` sums a token's experts in registers: no atomics, the same bits every time. With SHARE, the
experts that tokens share are read once: the first pair of an expert computes the rows of all its pairs, and another
kernel sums them.

On Hopper each kernel is launched before its predecessor has finished (`DEPENDENT`); the down kernels load weights
before they wait. Before the wait, only results of kernels before the predecessor may be read: every kernel here waits
before it lets its successor start, so router ids may be read there and `h` may not.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.gated import activate
from anabranch.kernels.triton.launch import wait_for_predecessor
from anabranch.kernels.triton.quantized import VECTOR, add_products, load_scales


@triton.jit
def next_pair(expert_N, e, after, num_pairs, PAIRS: tl.constexpr):
    """The first pair after `after` that has expert e; num_pairs or more if there is none."""
    p = tl.arange(0, PAIRS)
    ids = tl.load(expert_N + p, mask=p < num_pairs, other=-1)
    return tl.min(tl.where((ids == e) & (p > after), p, PAIRS), 0)


@triton.jit(do_not_specialize=["num_pairs"])
def gate_up_small(
    x_TD, x_stride, expert_N, gate_up_EFD, scale, zero, bias_EF, h_NI, num_pairs, D, inner, num_groups,
    K: tl.constexpr, PAIRS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, ACTIVATION: tl.constexpr, DEPENDENT: tl.constexpr,
    KIND: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """ROWS columns of h (ROWS gate rows and their up rows) of one pair, or of all pairs that share its expert.

    D is the width of a row of weights as it is stored, in bytes where weights are quantised (see quantized)."""
    pair = tl.program_id(0)
    wait_for_predecessor(DEPENDENT)
    e = tl.load(expert_N + pair)
    if e < 0:
        return
    if SHARE:
        if next_pair(expert_N, e, -1, num_pairs, PAIRS) < pair:
            return
    r = tl.arange(0, 2 * ROWS)
    column = tl.program_id(1) * ROWS + r % ROWS
    d = tl.arange(0, CHUNK)
    row = tl.where(r < ROWS, 0, inner) + tl.minimum(column, inner - 1)
    w_ptr = gate_up_EFD + e.to(tl.int64) * (2 * inner * D) + row[:, None] * D + d[None, :]
    while pair < num_pairs:
        x_row = x_TD + (pair // K).to(tl.int64) * x_stride
        # A copy of x for every weight row, so that it is loaded by the threads that hold the weights.
        x_ptr = x_row + d[None, :] + tl.zeros([2 * ROWS, 1], tl.int32)
        w = ()
        x = ()
        for c in tl.static_range(NUM_CHUNKS):
            inside = c * CHUNK + d < D
            w = w + (tl.load(w_ptr + c * CHUNK, mask=inside[None, :], other=0.0),)
        s = ()
        z = ()
        if KIND != "":
            first = (e.to(tl.int64) * tl.cdiv(2 * inner, OUTPUTS) + row // OUTPUTS) * num_groups
            s = load_scales(s, scale, first, e >= 0, D, CHUNK, NUM_CHUNKS, KIND, SPAN, INPUTS)
            if zero is not None:
                first = (e.to(tl.int64) * (2 * inner) + row) * num_groups
                z = load_scales(z, zero, first, e >= 0, D, CHUNK, NUM_CHUNKS, KIND, SPAN, INPUTS, True)
        # Issue all weight loads before the first is used; without this the assembler saves registers instead.
        tl.debug_barrier()
        if KIND != "":
            acc = tl.zeros([2 * ROWS, CHUNK // VECTOR], tl.float32)
            acc = add_products(acc, w, s, z, x_row, 1.0, D, 2 * ROWS, CHUNK, 0, NUM_CHUNKS, KIND, SPAN)
        else:
            for c in tl.static_range(NUM_CHUNKS):
                x = x + (tl.load(x_ptr + c * CHUNK, mask=(c * CHUNK + d < D)[None, :], other=0.0),)
            acc = tl.zeros([2 * ROWS, CHUNK], tl.float32)
            for c in tl.static_range(NUM_CHUNKS):
                acc += w[c].to(tl.float32) * x[c].to(tl.float32)
        both = tl.sum(acc, 1)
        if bias_EF is not None:
            both += tl.load(bias_EF + e * (2 * inner) + row).to(tl.float32)
        gate, up = tl.split(tl.trans(tl.reshape(both, (2, ROWS))))
        h = activate(gate, up, ACTIVATION)
        out = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        tl.store(h_NI + pair * inner + out, h.to(h_NI.dtype.element_ty), mask=out < inner)
        pair = next_pair(expert_N, e, pair, num_pairs, PAIRS) if SHARE else num_pairs


@triton.jit
def down_token(
    weight_TK, expert_TK, h_NI, down_EDI, scale, zero, bias_ED, y_TD, scaling, D, width, inner, num_groups,
    K: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, AHEAD: tl.constexpr,
    DEPENDENT: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of one token, summed over its experts in registers.

    The weights of AHEAD experts are loaded before the wait: as many as leave registers for all programs at once.
    `width` is that of a row of weights as it is stored.
    """
    t = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, CHUNK)
    row = tl.minimum(column, D - 1)
    within = row[:, None] * width + i[None, :]
    w = ()
    for k in tl.static_range(AHEAD):
        e = tl.load(expert_TK + t * K + k).to(tl.int64)
        for c in tl.static_range(NUM_CHUNKS):
            inside = (e >= 0) & (c * CHUNK + i < width)
            w = w + (tl.load(down_EDI + e * (D * width) + within + c * CHUNK, mask=inside[None, :], other=0.0),)
    s = ()
    z = ()
    if KIND != "":
        for k in tl.static_range(K):
            e = tl.load(expert_TK + t * K + k).to(tl.int64)
            first = (e * tl.cdiv(D, OUTPUTS) + row // OUTPUTS) * num_groups
            s = load_scales(s, scale, first, e >= 0, width, CHUNK, NUM_CHUNKS, KIND, SPAN, INPUTS)
            if zero is not None:
                first = (e * D + row) * num_groups
                z = load_scales(z, zero, first, e >= 0, width, CHUNK, NUM_CHUNKS, KIND, SPAN, INPUTS, True)
    wait_for_predecessor(DEPENDENT)
    for k in tl.static_range(AHEAD, K):
        e = tl.load(expert_TK + t * K + k).to(tl.int64)
        for c in tl.static_range(NUM_CHUNKS):
            inside = (e >= 0) & (c * CHUNK + i < width)
            w = w + (tl.load(down_EDI + e * (D * width) + within + c * CHUNK, mask=inside[None, :], other=0.0),)
    if KIND != "":
        acc = tl.zeros([COLUMNS, CHUNK // VECTOR], tl.float32)
    else:
        acc = tl.zeros([COLUMNS, CHUNK], tl.float32)
    # A copy of h for every column, as with x in gate_up_small.
    h_ptr = h_NI + t * (K * inner) + i[None, :] + tl.zeros([COLUMNS, 1], tl.int32)
    y = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(K):
        e = tl.load(expert_TK + t * K + k)
        weight = tl.load(weight_TK + t * K + k) * scaling
        if KIND != "":
            # An expert that is elsewhere: no inputs, since its h was not written.
            acc = add_products(
                acc, w, s, z, h_NI + (t * K + k) * inner, weight, tl.where(e >= 0, width, 0),
                COLUMNS, CHUNK, k * NUM_CHUNKS, NUM_CHUNKS, KIND, SPAN,
            )  # fmt: skip
        else:
            for c in tl.static_range(NUM_CHUNKS):
                inside = (e >= 0) & (c * CHUNK + i < inner)
                h = tl.load(h_ptr + k * inner + c * CHUNK, mask=inside[None, :], other=0.0)
                acc += w[k * NUM_CHUNKS + c].to(tl.float32) * (h.to(tl.float32) * weight)
        if bias_ED is not None:
            y += tl.load(bias_ED + e * D + row, mask=e >= 0, other=0.0).to(tl.float32) * weight
    y += tl.sum(acc, 1)
    tl.store(y_TD + t.to(tl.int64) * D + column, y.to(y_TD.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["num_pairs"])
def down_pair(
    weight_N, expert_N, h_NI, down_EDI, scale, zero, bias_ED, rows_ND, num_pairs, scaling, D, width, inner, num_groups,
    PAIRS: tl.constexpr, SHARE: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    DEPENDENT: tl.constexpr, KIND: tl.constexpr, SPAN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """COLUMNS outputs of one pair, or of all pairs that share its expert; rows without an expert are not written."""
    pair = tl.program_id(0)
    e = tl.load(expert_N + pair)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own = e >= 0
    if SHARE:
        own = own & (next_pair(expert_N, e, -1, num_pairs, PAIRS) >= pair)
    i = tl.arange(0, CHUNK)
    row = tl.maximum(e, 0).to(tl.int64) * D + tl.minimum(column, D - 1)
    w_ptr = down_EDI + row[:, None] * width + i[None, :]
    w = ()
    for c in tl.static_range(NUM_CHUNKS):
        inside = own & (c * CHUNK + i < width)
        w = w + (tl.load(w_ptr + c * CHUNK, mask=inside[None, :], other=0.0),)
    s = ()
    z = ()
    if KIND != "":
        first = tl.maximum(e, 0).to(tl.int64) * tl.cdiv(D, OUTPUTS) + tl.minimum(column, D - 1) // OUTPUTS
        s = load_scales(s, scale, first * num_groups, own, width, CHUNK, NUM_CHUNKS, KIND, SPAN, INPUTS)
        if zero is not None:
            z = load_scales(z, zero, row * num_groups, own, width, CHUNK, NUM_CHUNKS, KIND, SPAN, INPUTS, True)
    wait_for_predecessor(DEPENDENT)
    if own:
        h_ptr = h_NI + i[None, :] + tl.zeros([COLUMNS, 1], tl.int32)
        while pair < num_pairs:
            weight = tl.load(weight_N + pair) * scaling
            if KIND != "":
                acc = add_products(
                    tl.zeros([COLUMNS, CHUNK // VECTOR], tl.float32), w, s, z, h_NI + pair * inner, 1.0, width,
                    COLUMNS, CHUNK, 0, NUM_CHUNKS, KIND, SPAN,
                )  # fmt: skip
            else:
                acc = tl.zeros([COLUMNS, CHUNK], tl.float32)
                for c in tl.static_range(NUM_CHUNKS):
                    h = tl.load(h_ptr + pair * inner + c * CHUNK, mask=(c * CHUNK + i < inner)[None, :], other=0.0)
                    acc += w[c].to(tl.float32) * h.to(tl.float32)
            y = tl.sum(acc, 1)
            if bias_ED is not None:
                y += tl.load(bias_ED + row).to(tl.float32)
            y = (y * weight).to(rows_ND.dtype.element_ty)
            tl.store(rows_ND + pair.to(tl.int64) * D + column, y, mask=column < D)
            pair = next_pair(expert_N, e, pair, num_pairs, PAIRS) if SHARE else num_pairs
