"""Twin of attention_prefill for Hopper, in Gluon: warps that only load, and two warpgroups that only compute.

T token rows, R requests, H query heads, G key-value heads (HG = H / G heads share one), D head dim, S slots in a page,
M page-table width; BN keys in a block. A program has 128 rows, a warpgroup 64 of them.

The loading warps fill a ring of stages with blocks of keys and values: with the copy engine, page by page, or 16 bytes
at a time where a block contains slots that are not the request's. The warpgroups are not synchronised: while one
computes exponentials, the matrix unit multiplies for the other. A warpgroup issues the product with the values of a
block together with that of the keys of the next block.

Rows, masks and what may be read before the wait: as in attention_prefill. Not supported: fp32, head dims that are not a
power of two or are above 256, pages that do not divide a block into whole groups of 8 rows (the swizzle's period), are
not contiguous or are FP8.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anabranch.kernels.compiling.gluon_names import barrier, thread_load, tma_load
from anabranch.kernels.triton.attention_prefill import find_rows

LOWEST = gl.constexpr(-1.0e30)
LOADING = gl.constexpr(128)
"""Threads that load; each arrives at the barrier when its part of a block is in shared memory."""
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""Blocks in shared memory: 64 columns of all rows, swizzled over 128 bytes, then the next 64."""


def descriptor(pages_PSGD: torch.Tensor) -> TensorDescriptor:
    """The pages for the copy engine, which loads 64 columns of a page's slots at a time."""
    P, S, G, D = pages_PSGD.shape
    return TensorDescriptor.from_tensor(pages_PSGD.view(P * S, G * D), [S, 64], SHARED)


# Partitions have long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def copy_keys(
    k_PSGD, v_PSGD, k_desc, v_desc, column, table, first_key, last_position, length, page_stride, slot_stride,
    k_ring, v_ring, k_full, v_full, k_empty, v_empty, S: gl.constexpr,
):
    """The loading warps. Slots without a key of the request may contain anything: blocks with such slots (at most the
    first of a window, and the last) are gathered, and a key that some row sees is read instead."""
    STAGES: gl.constexpr = k_ring.shape[0]
    BN: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    n = gl.arange(0, BN, gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    first_block, last_page = first_key // BN, (length - 1) // S
    pages = pages_of(table, first_block, last_page, BN // S)
    for block in range(first_block, last_position // BN + 1):
        step = block - first_block
        stage, free = step % STAGES, ((step // STAGES) & 1) ^ 1
        if (block * BN >= first_key) & (block * BN + BN <= length):
            mbarrier.wait(k_empty.index(stage), free)
            copy_block(k_desc, pages, column, k_ring.index(stage), k_full.index(stage), S)
            mbarrier.wait(v_empty.index(stage), free)
            copy_block(v_desc, pages, column, v_ring.index(stage), v_full.index(stage), S)
        else:
            inside = gl.minimum(gl.maximum(block * BN + n, first_key), last_position)
            page = gl.load(table + inside // S).to(gl.int64)
            offset = (page * page_stride + (inside % S) * slot_stride)[:, None]
            mbarrier.wait(k_empty.index(stage), free)
            thread_load(k_ring.index(stage), k_PSGD + d[None, :] + offset)
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), free)
            thread_load(v_ring.index(stage), v_PSGD + d[None, :] + offset)
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
        pages = pages_of(table, block + 1, last_page, BN // S)


@gluon.jit
def pages_of(table, block, last_page, PAGES: gl.constexpr):
    """The pages of a block of keys, as scalars for the copy engine."""
    pages = ()
    for j in gl.static_range(PAGES):
        pages = pages + (gl.load(table + gl.minimum(block * PAGES + j, last_page)),)
    return pages


@gluon.jit
def copy_block(desc, pages, column, block, bar, S: gl.constexpr):
    """64 columns of a page at a time."""
    BN: gl.constexpr = block.shape[0]
    D: gl.constexpr = block.shape[1]
    mbarrier.expect(bar, BN * D * 2)
    mbarrier.arrive(bar, count=LOADING - 1)  # as if each thread had copied
    for j in gl.static_range(BN // S):
        for h in gl.static_range(D // 64):
            part = block.slice(j * S, S, dim=0).slice(h * 64, 64, dim=1)
            tma_load(desc, [pages[j] * S, column + h * 64], bar, part)


@gluon.jit
def weigh(score, block, position, first, last, peak, total, scale, window, WINDOWED: gl.constexpr):
    """(weights, the factor for previous sums, the new peak, the new total) of a block's scores."""
    BN: gl.constexpr = score.shape[1]
    cut = block * BN + BN - 1 > first
    if WINDOWED:
        cut = cut | (block * BN <= last - window)
    if cut:  # only blocks at the diagonal and at the far end of the window
        key = block * BN + gl.arange(0, BN, gl.SliceLayout(0, score.type.layout))
        visible = key[None, :] <= position[:, None]
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        score = gl.where(visible, score, float("-inf"))
    higher = gl.maximum(peak, gl.max(score, 1) * scale)
    p = gl.exp2(score * scale - higher[:, None])
    fade = gl.exp2(peak - higher)
    return p, fade, higher, total * fade + gl.sum(p, 1)


@gluon.jit
def attend_warpgroup(
    q_THD, out_THD, begin, first_row, num_rows, first_position, first_key, last_position, g, num_heads,
    q_stride, q_head_stride, scale, window, q_ring, k_ring, v_ring, k_full, v_full, k_empty, v_empty,
    WHO: gl.constexpr, HG: gl.constexpr, WINDOWED: gl.constexpr,
):
    """64 rows from first_row + 64 · WHO on; first_position is that of the request's first new token."""
    STAGES: gl.constexpr = k_ring.shape[0]
    BN: gl.constexpr = k_ring.shape[1]
    D: gl.constexpr = k_ring.shape[2]
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    mine = first_row + WHO * 64
    row = mine + gl.arange(0, 64, gl.SliceLayout(1, blocked))
    d = gl.arange(0, D, gl.SliceLayout(0, blocked))
    token, head = (begin + row // HG).to(gl.int64), g * HG + row % HG
    q_ptr = q_THD + (token * q_stride + head * q_head_stride)[:, None] + d[None, :]
    q = q_ring.index(WHO)
    q.store(gl.load(q_ptr, mask=(row < num_rows)[:, None], other=0.0))
    fence_async_shared()
    barrier()

    position = first_position + (mine + gl.arange(0, 64, gl.SliceLayout(1, score_layout))) // HG
    first, last = first_position + mine // HG, first_position + (mine + 63) // HG
    peak = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, score_layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
    acc = gl.zeros([64, D], gl.float32, acc_layout)
    nothing = gl.zeros([64, BN], gl.float32, score_layout)
    first_block, last_block = first_key // BN, last_position // BN
    mbarrier.wait(k_full.index(0), 0)
    fence_async_shared()  # threads may have written it, not the copy engine
    score = warpgroup_mma(q, k_ring.index(0).permute([1, 0]), nothing, use_acc=False, is_async=True)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(k_empty.index(0), count=1)
    p, fade, peak, total = weigh(score, first_block, position, first, last, peak, total, scale, window, WINDOWED)
    weight = gl.convert_layout(p.to(out_THD.dtype.element_ty), p_layout)
    for block in range(first_block, last_block):
        # Issue this block's values and the next one's keys together: the matrix unit is busy until both are done, and
        # the other warpgroup uses it while this one computes weights.
        step = block - first_block
        stage, ahead = step % STAGES, (step + 1) % STAGES
        mbarrier.wait(k_full.index(ahead), ((step + 1) // STAGES) & 1)
        mbarrier.wait(v_full.index(stage), (step // STAGES) & 1)
        if (block + 1 == last_block) | (step == 0):  # as above
            fence_async_shared()
        score = warpgroup_mma(q, k_ring.index(ahead).permute([1, 0]), nothing, use_acc=False, is_async=True)
        acc = warpgroup_mma(weight, v_ring.index(stage), acc, is_async=True)
        score = warpgroup_mma_wait(1, deps=[score])  # weights are computed while the product with values runs
        mbarrier.arrive(k_empty.index(ahead), count=1)
        p, fade, peak, total = weigh(score, block + 1, position, first, last, peak, total, scale, window, WINDOWED)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(stage), count=1)
        weight = gl.convert_layout(p.to(out_THD.dtype.element_ty), p_layout)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc_layout))[:, None]
    step = last_block - first_block
    mbarrier.wait(v_full.index(step % STAGES), (step // STAGES) & 1)
    fence_async_shared()
    acc = warpgroup_mma(weight, v_ring.index(step % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])

    total = gl.where(total == 0, 1.0, total)  # rows after the last one may see no key
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, acc_layout))[:, None]
    out = gl.convert_layout(acc.to(out_THD.dtype.element_ty), blocked)
    gl.store(out_THD + (token * num_heads + head)[:, None] * D + d[None, :], out, mask=(row < num_rows)[:, None])


@gluon.jit(do_not_specialize=["num_tokens", "num_requests", "scale", "window", "table_stride", "trigger", "alone"])
def attend_rows_hopper(
    q_THD, k_PSGD, v_PSGD, page_table_RM, query_start_R, context_len_R, out_THD,
    num_tokens, num_requests, scale, window,
    q_stride, q_head_stride, page_stride, slot_stride, head_stride, table_stride, trigger, alone, k_desc, v_desc,
    HG: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, S: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
    RP: gl.constexpr, WINDOWED: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Like attend_rows."""
    BM: gl.constexpr = 128
    g, b = gl.program_id(0), gl.num_programs(1) - 1 - gl.program_id(1)
    num_heads = gl.num_programs(0) * HG
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    r, begin, num_queries, num_rows, length, first_row = find_rows(
        query_start_R, context_len_R, num_requests, num_tokens, trigger, gl.arange(0, RP, flat), b, HG, BM, DEPENDENT
    )
    if first_row >= num_rows:
        return
    if (r < num_requests) & (num_queries == 1) & (alone == 0):
        return
    first_position = length - num_queries
    last_position = gl.minimum(first_position + (first_row + BM - 1) // HG, length - 1)
    if (r == num_requests) | (last_position < 0):
        blocked: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
        row = first_row + gl.arange(0, BM, gl.SliceLayout(1, blocked))
        d = gl.arange(0, D, gl.SliceLayout(0, blocked))
        place = ((begin + row // HG).to(gl.int64) * num_heads + g * HG + row % HG)[:, None] * D + d[None, :]
        gl.store(out_THD + place, gl.zeros([BM, D], out_THD.dtype.element_ty, blocked), mask=(row < num_rows)[:, None])
        return

    first_key = gl.maximum(first_position + first_row // HG - window + 1, 0) if WINDOWED else last_position * 0
    q_ring = gl.allocate_shared_memory(q_THD.dtype.element_ty, [2, 64, D], k_desc.layout)
    k_ring = gl.allocate_shared_memory(q_THD.dtype.element_ty, [STAGES, BN, D], k_desc.layout)
    v_ring = gl.allocate_shared_memory(q_THD.dtype.element_ty, [STAGES, BN, D], k_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):  # every loading thread arrives, and each warpgroup once
        mbarrier.init(k_full.index(stage), count=LOADING)
        mbarrier.init(v_full.index(stage), count=LOADING)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    gl.warp_specialize(
        [
            (attend_warpgroup, (q_THD, out_THD, begin, first_row, num_rows, first_position, first_key, last_position,
                                g, num_heads, q_stride, q_head_stride, scale, window,
                                q_ring, k_ring, v_ring, k_full, v_full, k_empty, v_empty, 0, HG, WINDOWED)),
            (attend_warpgroup, (q_THD, out_THD, begin, first_row, num_rows, first_position, first_key, last_position,
                                g, num_heads, q_stride, q_head_stride, scale, window,
                                q_ring, k_ring, v_ring, k_full, v_full, k_empty, v_empty, 1, HG, WINDOWED)),
            (copy_keys, (k_PSGD + g * head_stride, v_PSGD + g * head_stride, k_desc, v_desc, g * D,
                         page_table_RM + r * table_stride, first_key, last_position, length, page_stride, slot_stride,
                         k_ring, v_ring, k_full, v_full, k_empty, v_empty, S)),
        ],
        [4, 4], [208, 88],
    )
