"""Twin of gated_delta_chunks.scan_chunks for Hopper, in Gluon: a warp that only loads, and a warpgroup that computes.

Letters and formulas as there. A program has BV columns of the state of a request and a value head, in registers. The
copy engine brings what prepare_chunks has made of a chunk while the one before is computed. From one state to the next
there are two products, w S and kᵀ Δ; those that make the results run beside what lies between these.

The copy engine reads whole chunks. Rows after a request's last one may hold anything, so their updates are set to zero,
and so are their keys, which are multiplied by these. Not supported: fp32, K other than 128, V that BV does not divide.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from anabranch.kernels.compiling.gluon_names import barrier, tma_load
from anabranch.kernels.triton.attention_decode import load_request
from anabranch.kernels.triton.launch import wait_for_predecessor


def descriptor(x: torch.Tensor, columns: int, rows: int) -> TensorDescriptor:
    """Of `columns` of `rows` tokens."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * columns), element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(x.view(x.shape[0], -1), [rows, columns], layout)


# Partitions have long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def rows_of(i, cut, num_rows, N: gl.constexpr):
    """Of chunk i the first row, and the one after the last of its part: a chunk ends where a request is cut."""
    before = i * N < cut
    return gl.where(before, i * N, cut + (i - (cut + N - 1) // N) * N), gl.where(before, cut, num_rows)


@gluon.jit
def load_chunks(q_desc, k_desc, w_desc, qk_desc, u_desc, begin, cut, num_rows, q_column, w_column, qk_column, u_column,
                q_ring, k_ring, w_ring, qk_ring, u_ring, full, empty):
    STAGES: gl.constexpr = q_ring.shape[0]
    N: gl.constexpr = q_ring.shape[1]
    K: gl.constexpr = q_ring.shape[2]
    BV: gl.constexpr = u_ring.shape[2]
    for i in range((cut + N - 1) // N + (num_rows - cut + N - 1) // N):
        first_row, _ = rows_of(i, cut, num_rows, N)
        stage, token = i % STAGES, begin + first_row
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, N * (3 * K + N + BV) * 2)
        tma_load(w_desc, [token, w_column], bar, w_ring.index(stage))
        tma_load(u_desc, [token, u_column], bar, u_ring.index(stage))
        tma_load(k_desc, [token, q_column], bar, k_ring.index(stage))
        tma_load(q_desc, [token, q_column], bar, q_ring.index(stage))
        tma_load(qk_desc, [token, qk_column], bar, qk_ring.index(stage))


@gluon.jit
def scan_columns(state, cut_state, y, sum_R, cut, num_rows, used, H, y_stride,
                 q_ring, k_ring, w_ring, qk_ring, u_ring, state_ring, delta_ring, full, empty, V: gl.constexpr):
    """`state`, y: the first of the columns; y, sum_R: the first row of the request; cut_state: where the state goes
    after `cut` rows."""
    STAGES: gl.constexpr = q_ring.shape[0]
    N: gl.constexpr = q_ring.shape[1]
    K: gl.constexpr = q_ring.shape[2]
    BV: gl.constexpr = u_ring.shape[2]
    dtype: gl.constexpr = q_ring.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BV, 16])
    n = gl.arange(0, N, gl.SliceLayout(1, layout))
    v = gl.arange(0, BV, gl.SliceLayout(0, layout))
    k = gl.arange(0, K, gl.SliceLayout(1, layout))
    place = k[:, None] * V + v[None, :]
    state_KV = gl.load(state + place, mask=used & (k >= 0)[:, None], other=0.0).to(gl.float32)
    nothing = gl.zeros([N, BV], gl.float32, layout)
    parts = (cut + N - 1) // N
    first_row, end = rows_of(0, cut, num_rows, N)
    sum_N = gl.load(sum_R + gl.minimum(first_row + n, end - 1) * H)
    last = gl.load(sum_R + gl.minimum(first_row + N - 1, end - 1) * H)
    for i in range(parts + (num_rows - cut + N - 1) // N):
        stage = i % STAGES
        state_d = state_ring.index(i & 1)
        state_d.store(state_KV.to(dtype))
        fence_async_shared()
        barrier()
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        delta = warpgroup_mma(w_ring.index(stage), state_d, nothing, use_acc=False, is_async=True)
        o = warpgroup_mma(q_ring.index(stage), state_d, nothing, use_acc=False, is_async=True)
        u = u_ring.index(stage).load(layout)
        faded, to_last, whole = gl.exp(sum_N), gl.exp(last - sum_N), gl.exp(last)
        next_row, next_end = rows_of(i + 1, cut, num_rows, N)
        sum_N = gl.load(sum_R + gl.minimum(next_row + n, next_end - 1) * H)
        last = gl.load(sum_R + gl.minimum(next_row + N - 1, next_end - 1) * H)
        if first_row + N > end:
            part: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            real = first_row + gl.arange(0, N, gl.SliceLayout(1, part)) < end
            k_ring.index(stage).store(gl.where(real[:, None], k_ring.index(stage).load(part), 0.0))
        delta = warpgroup_mma_wait(1, deps=[delta])
        delta = gl.where((first_row + n < end)[:, None], u.to(gl.float32) - delta, 0.0)
        delta_ring.index(0).store(delta.to(dtype))
        delta_ring.index(1).store((delta * to_last[:, None]).to(dtype))
        state_KV *= whole
        fence_async_shared()
        barrier()
        keys = k_ring.index(stage).permute([1, 0])
        state_KV = warpgroup_mma(keys, delta_ring.index(1), state_KV, is_async=True)
        o = warpgroup_mma_wait(1, deps=[o])
        o = warpgroup_mma(qk_ring.index(stage), delta_ring.index(0), o * faded[:, None], is_async=True)
        state_KV = warpgroup_mma_wait(1, deps=[state_KV])
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(empty.index(stage), count=1)
        row = first_row + n
        gl.store(y + row.to(gl.int64)[:, None] * y_stride + v[None, :], o.to(dtype), mask=(row < end)[:, None])
        if i + 1 == parts:
            kept = state_KV.to(state.dtype.element_ty)
            gl.store(cut_state + place, kept)
            state_KV = kept.to(gl.float32)
        first_row, end = next_row, next_end
    gl.store(state + place, state_KV.to(state.dtype.element_ty))


@gluon.jit(do_not_specialize=["num_requests"])
def scan_chunks_hopper(
    q_desc, k_desc, w_desc, qk_desc, u_desc, state_PHKV, page_R, query_start_R, context_len_R, cut_R, cut_page_R,
    sum_TH, y_THV, num_requests, state_stride, G: gl.constexpr, HG: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    N: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Like scan_chunks."""
    H: gl.constexpr = G * HG
    s, h, r = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    begin, end, length = load_request(query_start_R, context_len_R, r, r < num_requests)
    cut, cut_page = gl.load(cut_R + r), gl.load(cut_page_R + r).to(gl.int64)
    wait_for_predecessor(DEPENDENT, trigger=0)
    num_rows = end - begin
    if (num_rows < 2) | (length == 0):
        return
    used = length > num_rows
    page, token = gl.load(page_R + r).to(gl.int64), begin.to(gl.int64)
    q_ring = gl.allocate_shared_memory(y_THV.dtype.element_ty, [STAGES, N, K], q_desc.layout)
    k_ring = gl.allocate_shared_memory(y_THV.dtype.element_ty, [STAGES, N, K], q_desc.layout)
    w_ring = gl.allocate_shared_memory(y_THV.dtype.element_ty, [STAGES, N, K], q_desc.layout)
    qk_ring = gl.allocate_shared_memory(y_THV.dtype.element_ty, [STAGES, N, N], q_desc.layout)
    u_ring = gl.allocate_shared_memory(y_THV.dtype.element_ty, [STAGES, N, BV], u_desc.layout)
    state_ring = gl.allocate_shared_memory(y_THV.dtype.element_ty, [2, K, BV], u_desc.layout)
    delta_ring = gl.allocate_shared_memory(y_THV.dtype.element_ty, [2, N, BV], u_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    column = h * V + s * BV
    state = state_PHKV + h * (K * V) + s * BV
    gl.warp_specialize(
        [
            (scan_columns, (state + page * state_stride, state + cut_page * state_stride,
                            y_THV + token * (H * V) + column, sum_TH + token * H + h, cut, num_rows, used, H, H * V,
                            q_ring, k_ring, w_ring, qk_ring, u_ring, state_ring, delta_ring, full, empty, V)),
            (load_chunks, (q_desc, k_desc, w_desc, qk_desc, u_desc, begin, cut, num_rows, h // HG * K, h * K, h * N,
                           column, q_ring, k_ring, w_ring, qk_ring, u_ring, full, empty)),
        ],
        [1], [40],
    )
