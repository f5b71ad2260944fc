"""Experts on Hopper: persistent grouped products with warps that only load and warps that only multiply.

T tokens, D hidden width, K experts per token, E experts, I expert width (`inner`), F = 2 · I, N = T · K pairs, M tiles.

Twin of experts_grouped, in Gluon, to control how loads and products overlap. A few warps fill a ring of stages in
shared memory without a pause between tiles: weights by the copy engine, rows of x gathered with 16-byte copies. One or
two warpgroups (GROUPS) multiply and share the weights; each takes one or two slabs of 64 rows (SLABS). They are not
synchronised: one writes its results while the other multiplies, and while both write, the ring fills. Slabs without
rows are neither loaded nor multiplied. Tiles take different times, so programs take work items from a counter; the
loading warps do, and pass the item on through shared memory.

A tile may hold a few rows more than its slabs (EXTRA): with operands swapped they are a narrow product, much cheaper
than loading the expert's weights again for them.

Not supported: biases, fp32, adding into tokens' rows (see experts_grouped).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.compiling.gluon_names import thread_load, tma_load
from anabranch.kernels.triton.experts_ring import (
    locate,
    make_ring,
    multiply_extra,
    multiply_slab,
    multiply_two,
    publish_tile,
    read_tile,
)
from anabranch.kernels.triton.gated import activate

SHARED = {bits // 8: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}
"""How both operands lie in shared memory, by bytes of an element: rows of 128 bytes, swizzled."""


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """The tensor as a matrix, its last dimension as columns, for the copy engine."""
    return TensorDescriptor.from_tensor(
        tensor.view(-1, tensor.shape[-1]), [rows, columns], SHARED[tensor.element_size()]
    )


# Partitions have long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def pairs_of(order_N, begin, end, r, SLABS: gl.constexpr):
    """The pair of each row, for every 64 rows."""
    pairs = ()
    for slab in gl.static_range(SLABS):
        row = begin + slab * 64 + r
        pairs = pairs + (gl.load(order_N + row, mask=row < end, other=0),)
    return pairs


@gluon.jit
def gather_depth(
    x_TD, w_desc, offsets, reals, first, narrow, inner, step, ring,
    BEGIN: gl.constexpr, END: gl.constexpr, EXTRA: gl.constexpr, NARROW: gl.constexpr,
):
    """Fill a stage for every BK of the depth from BEGIN to END."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SLABS: gl.constexpr = a_ring.shape[0] // STAGES
    BK: gl.constexpr = a_ring.shape[2]
    BN: gl.constexpr = b_ring.shape[1] // 2
    BOX: gl.constexpr = BN // 2 if NARROW else BN
    SIZE: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    for k in range(BEGIN, END, BK):
        stage = step % STAGES
        bar = full.index(stage)
        b = b_ring.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        if narrow:
            mbarrier.expect(bar, 2 * BOX * BK * SIZE)
            tma_load(w_desc, [first, k], bar, b.slice(0, BOX, dim=0))
            tma_load(w_desc, [first + inner, k], bar, b.slice(BOX, BOX, dim=0))
        else:
            mbarrier.expect(bar, 2 * BN * BK * SIZE)
            for part in gl.static_range(BN // BOX):
                tma_load(w_desc, [first + part * BOX, k], bar, b.slice(part * BOX, BOX, dim=0))
                tma_load(w_desc, [first + inner + part * BOX, k], bar, b.slice(BN + part * BOX, BOX, dim=0))
        for slab in gl.static_range(SLABS):
            thread_load(a_ring.index(stage * SLABS + slab), x_TD + (offsets[slab] + k), mask=reals[slab])
        if EXTRA:
            thread_load(x_ring.index(stage), x_TD + (offsets[SLABS] + k), mask=reals[SLABS])
        async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def gather_and_load(
    x_TD, x_stride, w_desc, order_N, tile_3M, max_tiles, num_tiles, num_blocks, inner, counter, ring,
    K: gl.constexpr, DEPTH: gl.constexpr, BAND: gl.constexpr, EXTRA: gl.constexpr, NARROW: gl.constexpr,
):
    """The loading warps of the gate/up product."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SLABS: gl.constexpr = a_ring.shape[0] // STAGES
    BK: gl.constexpr = a_ring.shape[2]
    BN: gl.constexpr = b_ring.shape[1] // 2
    HEAD: gl.constexpr = STAGES * BK if STAGES * BK < DEPTH else DEPTH
    VECTOR: gl.constexpr = 128 // w_desc.dtype.primitive_bitwidth
    LANES: gl.constexpr = BK // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // LANES, LANES], [4, 1], [1, 0])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))
    x_r = gl.arange(0, 16, gl.SliceLayout(1, layout)) + SLABS * 64
    d = gl.arange(0, BK, gl.SliceLayout(0, layout))
    step = 0
    index = gl.program_id(0)
    block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
    pairs = pairs_of(order_N, begin, end, r, SLABS)
    while index < num_tiles * num_blocks:
        publish_tile(tile_info, empty, step, block, begin, end, expert)
        offsets = ()
        reals = ()
        for slab in gl.static_range(SLABS):
            # 32-bit offsets, to save registers.
            offsets = offsets + ((pairs[slab] // K)[:, None] * x_stride + d[None, :],)
            reals = reals + ((begin + slab * 64 + r < end)[:, None],)
        if EXTRA:
            extra = gl.load(order_N + begin + x_r, mask=begin + x_r < end, other=0)
            offsets = offsets + ((extra // K)[:, None] * x_stride + d[None, :],)
            reals = reals + ((begin + x_r < end)[:, None],)
        first = expert * (2 * inner) + block * BN
        narrow = (NARROW > 0) & (block * BN + BN > inner)
        step = gather_depth(x_TD, w_desc, offsets, reals, first, narrow, inner, step, ring, 0, HEAD, EXTRA, NARROW)
        # The ring is full: load the next work item meanwhile.
        index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
        pairs = pairs_of(order_N, begin, end, r, SLABS)
        step = gather_depth(x_TD, w_desc, offsets, reals, first, narrow, inner, step, ring, HEAD, DEPTH, EXTRA, NARROW)
    publish_tile(tile_info, empty, step, -1, 0, 0, 0)
    mbarrier.expect(full.index(step % STAGES), 0)
    async_copy.mbarrier_arrive(full.index(step % STAGES), increment_count=False)


@gluon.jit
def load_depth(
    h_desc, extra_desc, w_desc, first, row, num_rows, step, ring,
    BEGIN: gl.constexpr, END: gl.constexpr, EARLY: gl.constexpr, EXTRA: gl.constexpr,
):
    """Fill a stage for every BK of the depth from BEGIN to END; the first EARLY steps have their weights already."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SLABS: gl.constexpr = a_ring.shape[0] // STAGES
    BK: gl.constexpr = a_ring.shape[2]
    BN: gl.constexpr = b_ring.shape[1]
    SIZE: gl.constexpr = w_desc.dtype.primitive_bitwidth // 8
    for k in range(BEGIN, END, BK):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        # One arrival for any number of rows.
        for slab in gl.static_range(SLABS):
            last = num_rows > slab * 64
            if (slab < SLABS - 1) | (EXTRA > 0):
                last = last & (num_rows <= slab * 64 + 64)
            mbarrier.expect(bar, (slab * 64 + 64 + BN) * BK * SIZE, pred=last)
        if EXTRA:
            mbarrier.expect(bar, (SLABS * 64 + EXTRA + BN) * BK * SIZE, pred=num_rows > SLABS * 64)
        tma_load(w_desc, [first, k], bar, b_ring.index(stage), pred=step >= EARLY)
        for slab in gl.static_range(SLABS):
            tma_load(h_desc, [row + slab * 64, k], bar, a_ring.index(stage * SLABS + slab), pred=num_rows > slab * 64)
        if EXTRA:
            tma_load(extra_desc, [row + SLABS * 64, k], bar, x_ring.index(stage), pred=num_rows > SLABS * 64)
        step += 1
    return step


@gluon.jit
def load_rows(
    h_desc, extra_desc, w_desc, tile_3M, max_tiles, num_tiles, num_blocks, D, counter, ring,
    DEPTH: gl.constexpr, BAND: gl.constexpr, EXTRA: gl.constexpr,
):
    """The loading warp of the down product: rows of h are in tile order.

    The first weights are loaded before the gate/up kernel has finished; h is read after that.
    """
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    BK: gl.constexpr = a_ring.shape[2]
    BN: gl.constexpr = b_ring.shape[1]
    HEAD: gl.constexpr = STAGES * BK if STAGES * BK < DEPTH else DEPTH
    EARLY: gl.constexpr = HEAD // BK
    step = 0
    index = gl.program_id(0)
    block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
    for early in gl.static_range(EARLY):
        tma_load(
            w_desc, [expert * D + block * BN, early * BK], full.index(early), b_ring.index(early),
            pred=index < num_tiles * num_blocks,
        )
    gdc_wait()
    while index < num_tiles * num_blocks:
        publish_tile(tile_info, empty, step, block, begin, end, expert)
        first, row, num_rows = expert * D + block * BN, begin, end - begin
        step = load_depth(h_desc, extra_desc, w_desc, first, row, num_rows, step, ring, 0, HEAD, EARLY, EXTRA)
        index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
        step = load_depth(h_desc, extra_desc, w_desc, first, row, num_rows, step, ring, HEAD, DEPTH, EARLY, EXTRA)
    publish_tile(tile_info, empty, step, -1, 0, 0, 0)
    mbarrier.expect(full.index(step % STAGES), 0)


@gluon.jit
def store_gated(acc, h_NI, begin, end, first_column, inner, ACTIVATION: gl.constexpr):
    """64 rows of activation(gate) · up, from an accumulator that holds the gate columns and then the up columns."""
    BN: gl.constexpr = acc.shape[1] // 2
    out: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BN // 8), BN // 8], [4, 1], [1, 0])
    row = begin + gl.arange(0, 64, gl.SliceLayout(1, out))
    column = first_column + gl.arange(0, BN, gl.SliceLayout(0, out))
    gate, up = gl.split(gl.permute(gl.reshape(acc, [64, 2, BN]), [0, 2, 1]))
    h = gl.convert_layout(activate(gate, up, ACTIVATION).to(h_NI.dtype.element_ty), out)
    pointer = h_NI + row.to(gl.int64)[:, None] * inner + column[None, :]
    gl.store(pointer, h, mask=(row < end)[:, None] & (column < inner)[None, :])


@gluon.jit
def store_extra_gated(gate, up, h_NI, begin, end, first_column, inner, ACTIVATION: gl.constexpr):
    """The extra rows, which are columns of the product."""
    layout: gl.constexpr = gate.type.layout
    column = first_column + gl.arange(0, 64, gl.SliceLayout(1, layout))
    row = begin + gl.arange(0, gate.shape[1], gl.SliceLayout(0, layout))
    pointer = h_NI + row.to(gl.int64)[None, :] * inner + column[:, None]
    h = activate(gate, up, ACTIVATION).to(h_NI.dtype.element_ty)
    gl.store(pointer, h, mask=(row < end)[None, :] & (column < inner)[:, None])


@gluon.jit
def gate_up_tile(
    h_NI, begin, end, column, inner, step, ring,
    WHO: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr, WITH: gl.constexpr, DEPTH: gl.constexpr,
    EXTRA: gl.constexpr, ACTIVATION: gl.constexpr,
):
    """One warpgroup's part of a tile with BN columns. WITH: including extra rows, if there are any."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    SLABS: gl.constexpr = a_ring.shape[0] // b_ring.shape[0]
    plain = True
    if SLABS > GROUPS:
        if end - begin > (GROUPS + WHO) * 64:
            plain = False
            first, second, step = multiply_two(ring, step, WHO, GROUPS, DEPTH, True)
            store_gated(first, h_NI, begin + WHO * 64, end, column, inner, ACTIVATION)
            store_gated(second, h_NI, begin + (GROUPS + WHO) * 64, end, column, inner, ACTIVATION)
    if WITH & (EXTRA > 0):
        if end - begin > SLABS * 64:
            plain = False
            # Each warpgroup takes 64 columns of the extra rows; with BN = 64, the first one takes them all.
            SHARE: gl.constexpr = WHO * 64 if BN > 64 else 0
            acc, gate, up, step = multiply_extra(ring, step, WHO, 2 * BN, SHARE, BN + SHARE, DEPTH, True)
            store_gated(acc, h_NI, begin + WHO * 64, end, column, inner, ACTIVATION)
            store_extra_gated(gate, up, h_NI, begin + SLABS * 64, end, column + SHARE, inner, ACTIVATION)
    if plain:
        acc, step = multiply_slab(ring, step, end - begin, WHO, 2 * BN, DEPTH, True)
        if end - begin > WHO * 64:
            store_gated(acc, h_NI, begin + WHO * 64, end, column, inner, ACTIVATION)
    return step


@gluon.jit
def gate_up_warpgroup(
    h_NI, inner, ring, WHO: gl.constexpr, GROUPS: gl.constexpr, DEPTH: gl.constexpr, EXTRA: gl.constexpr,
    NARROW: gl.constexpr, ACTIVATION: gl.constexpr,
):
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    BN: gl.constexpr = b_ring.shape[1] // 2
    step = 0
    block, begin, end, _ = read_tile(tile_info, full, step)
    while block >= 0:
        wide = True
        if NARROW:
            # The last block has half the columns.
            wide = block * BN + BN <= inner
            if block * BN + BN > inner:
                step = gate_up_tile(
                    h_NI, begin, end, block * BN, inner, step, ring,
                    WHO, GROUPS, BN // 2, WHO == 0, DEPTH, EXTRA, ACTIVATION,
                )
        if wide:
            step = gate_up_tile(
                h_NI, begin, end, block * BN, inner, step, ring, WHO, GROUPS, BN, True, DEPTH, EXTRA, ACTIVATION
            )
        block, begin, end, _ = read_tile(tile_info, full, step)


@gluon.jit
def add_rows(value, pair, rows_ND, column, D, mask, K: gl.constexpr):
    """Add to the rows of tokens, which have K pairs each. Neighbouring columns of a thread are added at once."""
    gl.atomic_add(rows_ND + (pair // K).to(gl.int64) * D + column, value, mask=mask, sem="relaxed")


@gluon.jit
def fetch_scatter(weight_N, order_N, begin, end, width: gl.constexpr, out: gl.constexpr):
    """Pair and weight of 64 rows, each in the layout in which it is used."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    row = begin + gl.arange(0, 64, gl.SliceLayout(1, out))
    acc_row = begin + gl.arange(0, 64, gl.SliceLayout(1, layout))
    pair = gl.load(order_N + row, mask=row < end, other=-1)
    return pair, gl.load(weight_N + acc_row, mask=acc_row < end, other=0.0)


@gluon.jit
def store_weighted(acc, weight, pair, rows_ND, first_column, D, out: gl.constexpr, ADD: gl.constexpr = 0):
    """64 weighted rows, each to its pair; in halves, to leave shared memory for the ring. Or added, from where they
    are."""
    if ADD:
        column = first_column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, out))
        mask = (pair >= 0)[:, None] & (column < D)[None, :]
        add_rows(acc * weight[:, None], pair[:, None], rows_ND, column[None, :], D, mask, ADD)
    else:
        PART: gl.constexpr = acc.shape[1] // 2
        dtype: gl.constexpr = rows_ND.dtype.element_ty
        column = first_column + gl.arange(0, PART, gl.SliceLayout(0, out))
        left, right = gl.split(gl.permute(gl.reshape(acc * weight[:, None], [64, 2, PART]), [0, 2, 1]))
        pointer = rows_ND + pair.to(gl.int64)[:, None] * D + column[None, :]
        gl.store(pointer, gl.convert_layout(left.to(dtype), out), mask=(pair >= 0)[:, None] & (column < D)[None, :])
        mask = (pair >= 0)[:, None] & (column + PART < D)[None, :]
        gl.store(pointer + PART, gl.convert_layout(right.to(dtype), out), mask=mask)


@gluon.jit
def store_extra_weighted(acc, weight_N, order_N, rows_ND, begin, end, first_column, D, ADD: gl.constexpr):
    """The extra rows, which are columns of the product."""
    layout: gl.constexpr = acc.type.layout
    column = first_column + gl.arange(0, 64, gl.SliceLayout(1, layout))
    row = begin + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    pair = gl.load(order_N + row, mask=row < end, other=0)
    weight = gl.load(weight_N + row, mask=row < end, other=0.0)
    value = (acc * weight[None, :]).to(rows_ND.dtype.element_ty)
    mask = (row < end)[None, :] & (column < D)[:, None]
    if ADD:
        add_rows(value, pair[None, :], rows_ND, column[:, None], D, mask, ADD)
    else:
        gl.store(rows_ND + pair.to(gl.int64)[None, :] * D + column[:, None], value, mask=mask)


@gluon.jit
def down_warpgroup(
    weight_N, rows_ND, order_N, D, ring,
    WHO: gl.constexpr, GROUPS: gl.constexpr, DEPTH: gl.constexpr, EXTRA: gl.constexpr, ADD: gl.constexpr,
):
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    BN: gl.constexpr = b_ring.shape[1]
    SLABS: gl.constexpr = a_ring.shape[0] // b_ring.shape[0]
    moved: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BN // 16), BN // 16], [4, 1], [1, 0])
    out: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]) if ADD else moved
    step = 0
    block, begin, end, _ = read_tile(tile_info, full, step)
    while block >= 0:
        column = block * BN
        pair, weight = fetch_scatter(weight_N, order_N, begin + WHO * 64, end, BN, out)
        plain = True
        if SLABS > GROUPS:
            if end - begin > (GROUPS + WHO) * 64:
                plain = False
                pair2, weight2 = fetch_scatter(weight_N, order_N, begin + (GROUPS + WHO) * 64, end, BN, out)
                first, second, step = multiply_two(ring, step, WHO, GROUPS, DEPTH, False)
                store_weighted(first, weight, pair, rows_ND, column, D, out, ADD)
                store_weighted(second, weight2, pair2, rows_ND, column, D, out, ADD)
        if EXTRA:
            if end - begin > SLABS * 64:
                plain = False
                LEFT: gl.constexpr = WHO * (BN // 2)
                acc, left, right, step = multiply_extra(ring, step, WHO, BN, LEFT, LEFT + 64, DEPTH, False)
                store_weighted(acc, weight, pair, rows_ND, column, D, out, ADD)
                rows = begin + SLABS * 64
                store_extra_weighted(left, weight_N, order_N, rows_ND, rows, end, column + LEFT, D, ADD)
                store_extra_weighted(right, weight_N, order_N, rows_ND, rows, end, column + LEFT + 64, D, ADD)
        if plain:
            acc, step = multiply_slab(ring, step, end - begin, WHO, BN, DEPTH, False)
            if end - begin > WHO * 64:
                store_weighted(acc, weight, pair, rows_ND, column, D, out, ADD)
        block, begin, end, _ = read_tile(tile_info, full, step)


@gluon.jit(do_not_specialize=["max_tiles"])
def gate_up_hopper(
    x_TD, x_stride, w_desc, h_NI, order_N, tile_3M, head, max_tiles, inner,
    K: gl.constexpr, SLABS: gl.constexpr, EXTRA: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, GROUPS: gl.constexpr, NARROW: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """h[row, columns] = activation(gate · x) · (up · x); DEPTH is D. NARROW: the last block has BN / 2 columns."""
    # A stage is full after the copy engine's bytes and the copies of each of the 128 loading threads.
    ring = make_ring(w_desc, SLABS, 2 * BN, BK, STAGES, GROUPS, EXTRA, 129)
    gdc_wait()
    gdc_launch_dependents()
    num_tiles = gl.load(head)
    num_blocks = gl.cdiv(inner, BN)
    # Written out, because a concatenated tuple loses its constants.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (gate_up_warpgroup, (h_NI, inner, ring, 0, GROUPS, DEPTH, EXTRA, NARROW, ACTIVATION)),
                (gate_up_warpgroup, (h_NI, inner, ring, 1, GROUPS, DEPTH, EXTRA, NARROW, ACTIVATION)),
                (gather_and_load, (x_TD, x_stride, w_desc, order_N, tile_3M, max_tiles, num_tiles, num_blocks, inner,
                                   head + 1, ring, K, DEPTH, BAND, EXTRA, NARROW)),
            ],
            [4, 4], [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (gate_up_warpgroup, (h_NI, inner, ring, 0, GROUPS, DEPTH, EXTRA, NARROW, ACTIVATION)),
                (gather_and_load, (x_TD, x_stride, w_desc, order_N, tile_3M, max_tiles, num_tiles, num_blocks, inner,
                                   head + 1, ring, K, DEPTH, BAND, EXTRA, NARROW)),
            ],
            [4], [56],
        )


@gluon.jit(do_not_specialize=["max_tiles"])
def down_hopper(
    weight_N, h_desc, extra_desc, w_desc, rows_ND, order_N, tile_3M, head, max_tiles, D,
    SLABS: gl.constexpr, EXTRA: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, BAND: gl.constexpr, GROUPS: gl.constexpr, ADD: gl.constexpr,
):
    """rows[pair, columns] = weight · (down · h); DEPTH is I, weights are in tile order. ADD: rows of tokens, of so many
    pairs each, to which it is added."""
    ring = make_ring(w_desc, SLABS, BN, BK, STAGES, GROUPS, EXTRA, 1)
    gdc_launch_dependents()
    # The row order was complete before the gate/up kernel let this one start, so it may be read. Only the loading warp
    # reads h, and it waits.
    num_tiles = gl.load(head)
    num_blocks = gl.cdiv(D, BN)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (down_warpgroup, (weight_N, rows_ND, order_N, D, ring, 0, GROUPS, DEPTH, EXTRA, ADD)),
                (down_warpgroup, (weight_N, rows_ND, order_N, D, ring, 1, GROUPS, DEPTH, EXTRA, ADD)),
                (load_rows, (h_desc, extra_desc, w_desc, tile_3M, max_tiles, num_tiles, num_blocks, D, head + 2,
                             ring, DEPTH, BAND, EXTRA)),
            ],
            [4, 1], [224, 40],
        )
    else:
        gl.warp_specialize(
            [
                (down_warpgroup, (weight_N, rows_ND, order_N, D, ring, 0, GROUPS, DEPTH, EXTRA, ADD)),
                (load_rows, (h_desc, extra_desc, w_desc, tile_3M, max_tiles, num_tiles, num_blocks, D, head + 2,
                             ring, DEPTH, BAND, EXTRA)),
            ],
            [1], [40],
        )
