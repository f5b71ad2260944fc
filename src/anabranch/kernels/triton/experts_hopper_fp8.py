"""Experts with weights and activations of 8 bits on Hopper, for many tokens.

T tokens, D hidden width, K experts per token, I expert width (`inner`), N = T · K pairs, M tiles, G groups of 128
inputs.

Like experts_hopper, whose loading warps it uses, but both operands are FP8. Weights have a scale for every block of
128 x 128, activations one for every 128 inputs of a row. A product over 128 inputs starts from zero, because the
matrix unit keeps few bits of a sum; it is multiplied by both scales and added in fp32 on ordinary cores, while the
other warpgroup uses the matrix unit. The columns of a warpgroup are in two halves with a scale each, gate and up or
left and right, so that one product's registers serve both. The gate/up kernel quantises the rows that it writes.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.triton.experts_hopper import gather_and_load, load_rows, store_weighted
from anabranch.kernels.triton.experts_ring import make_ring, read_tile, wait_for_stage
from anabranch.kernels.triton.gated import activate

# Partitions have long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def load_scale(pointer):
    value = gl.load(pointer)
    if value.dtype == gl.uint8:
        return gl.exp2(value.to(gl.float32) - 127.0)
    else:
        return value.to(gl.float32)


@gluon.jit
def multiply_halves(
    ring, step, num_rows, row_scale, row_scale_stride, left_scale, right_scale,
    WHO: gl.constexpr, DEPTH: gl.constexpr, GATHERED: gl.constexpr,
):
    """A warpgroup's slab times each half of the columns, and the next step. Scales point to those of the first inputs;
    they are loaded one step ahead."""
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = b_ring.shape[0]
    SLABS: gl.constexpr = a_ring.shape[0] // STAGES
    BK: gl.constexpr = a_ring.shape[2]
    HALF: gl.constexpr = b_ring.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    left = gl.zeros([64, HALF], gl.float32, layout)
    right = gl.zeros([64, HALF], gl.float32, layout)
    part = gl.zeros([64, HALF], gl.float32, layout)
    if num_rows > WHO * 64:
        a = gl.load(row_scale)
        b_left = load_scale(left_scale)
        b_right = load_scale(right_scale)
        for k in range(0, DEPTH, BK):
            by_left = a * b_left
            by_right = a * b_right
            ahead = (k + BK < DEPTH).to(gl.int32)
            row_scale += ahead * row_scale_stride
            left_scale += ahead
            right_scale += ahead
            a = gl.load(row_scale)
            b_left = load_scale(left_scale)
            b_right = load_scale(right_scale)
            stage = wait_for_stage(full, step, GATHERED)
            rows = a_ring.index(stage * SLABS + WHO)
            weights = b_ring.index(stage)
            part = warpgroup_mma(
                rows, weights.slice(0, HALF, dim=0).permute([1, 0]), part, use_acc=False, is_async=True
            )
            part = warpgroup_mma_wait(0, deps=[part])
            left += part * by_left[:, None]
            part = warpgroup_mma(
                rows, weights.slice(HALF, HALF, dim=0).permute([1, 0]), part, use_acc=False, is_async=True
            )
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage), count=1)
            right += part * by_right[:, None]
            step += 1
    else:  # no rows: free the stages
        for _ in range(0, DEPTH, BK):
            mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
            mbarrier.arrive(empty.index(step % STAGES), count=1)
            step += 1
    return left, right, step


@gluon.jit
def gate_up_warpgroup(
    x_scale, x_scale_stride, scale, h_NI, h_scale, num_pairs, order_N, inner, ring,
    WHO: gl.constexpr, K: gl.constexpr, DEPTH: gl.constexpr, ACTIVATION: gl.constexpr,
):
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    BN: gl.constexpr = b_ring.shape[1] // 2
    GROUPS: gl.constexpr = (DEPTH + 127) // 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    out: gl.constexpr = gl.BlockedLayout([1, 16], [32 // (BN // 16), BN // 16], [4, 1], [1, 0])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout)) + WHO * 64
    out_r = gl.arange(0, 64, gl.SliceLayout(1, out)) + WHO * 64
    out_c = gl.arange(0, BN, gl.SliceLayout(0, out))
    step = 0
    block, begin, end, expert = read_tile(tile_info, full, step)
    while block >= 0:
        row = begin + r
        token = gl.load(order_N + gl.minimum(row, end - 1)) // K
        blocks = inner // 128
        gate_scale = scale + (expert * (2 * blocks) + block * BN // 128) * GROUPS
        gate, up, step = multiply_halves(
            ring, step, end - begin, x_scale + token, x_scale_stride, gate_scale, gate_scale + blocks * GROUPS,
            WHO, DEPTH, True,
        )
        if end - begin > WHO * 64:
            h = activate(gate, up, ACTIVATION)
            most = gl.maximum(gl.max(gl.abs(h), 1), 1e-10)
            gl.store(h_scale + block * num_pairs + row, most / 448.0, mask=row < end)
            q = gl.convert_layout((h * (448.0 / most)[:, None]).to(h_NI.dtype.element_ty), out)
            out_row = begin + out_r
            pointer = h_NI + out_row.to(gl.int64)[:, None] * inner + (block * BN + out_c)[None, :]
            gl.store(pointer, q, mask=(out_row < end)[:, None])
        block, begin, end, expert = read_tile(tile_info, full, step)


@gluon.jit
def down_warpgroup(
    h_scale, num_pairs, scale, weight_N, rows_ND, order_N, D, ring, WHO: gl.constexpr, DEPTH: gl.constexpr,
):
    a_ring, b_ring, x_ring, full, empty, tile_info = ring
    HALF: gl.constexpr = b_ring.shape[1] // 2
    GROUPS: gl.constexpr = (DEPTH + 127) // 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    out: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HALF // 16), HALF // 16], [4, 1], [1, 0])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout)) + WHO * 64
    out_r = gl.arange(0, 64, gl.SliceLayout(1, out)) + WHO * 64
    step = 0
    block, begin, end, expert = read_tile(tile_info, full, step)
    while block >= 0:
        row = begin + r
        pair = gl.load(order_N + begin + out_r, mask=begin + out_r < end, other=-1)
        weight = gl.load(weight_N + row, mask=row < end, other=0.0)
        column = block * 2 * HALF
        blocks = gl.cdiv(D, 128)
        first = scale + expert * blocks * GROUPS
        left, right, step = multiply_halves(
            ring, step, end - begin, h_scale + gl.minimum(row, end - 1), num_pairs, first + column // 128 * GROUPS,
            first + gl.minimum((column + HALF) // 128, blocks - 1) * GROUPS, WHO, DEPTH, False,
        )
        if end - begin > WHO * 64:
            store_weighted(left, weight, pair, rows_ND, column, D, out)
            store_weighted(right, weight, pair, rows_ND, column + HALF, D, out)
        block, begin, end, expert = read_tile(tile_info, full, step)


@gluon.jit(do_not_specialize=["max_tiles", "num_pairs", "x_scale_stride"])
def gate_up_hopper_fp8(
    x_TD, x_stride, x_scale, x_scale_stride, w_desc, scale, h_NI, h_scale, num_pairs, order_N, tile_3M, head, max_tiles,
    inner,
    K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, GROUPS: gl.constexpr, ACTIVATION: gl.constexpr,
):
    """h[row, columns] = activation(gate · x) · (up · x), quantised; DEPTH is D."""
    # A stage is full after the copy engine's bytes and the copies of each of the 128 loading threads.
    ring = make_ring(w_desc, GROUPS, 2 * BN, BK, STAGES, GROUPS, 0, 129)
    gdc_wait()
    gdc_launch_dependents()
    num_tiles = gl.load(head)
    num_blocks = gl.cdiv(inner, BN)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (gate_up_warpgroup, (x_scale, x_scale_stride, scale, h_NI, h_scale, num_pairs, order_N, inner,
                                     ring, 0, K, DEPTH, ACTIVATION)),
                (gate_up_warpgroup, (x_scale, x_scale_stride, scale, h_NI, h_scale, num_pairs, order_N, inner,
                                     ring, 1, K, DEPTH, ACTIVATION)),
                (gather_and_load, (x_TD, x_stride, w_desc, order_N, tile_3M, max_tiles, num_tiles, num_blocks, inner,
                                   head + 1, ring, K, DEPTH, BAND, 0, False)),
            ],
            [4, 4], [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (gate_up_warpgroup, (x_scale, x_scale_stride, scale, h_NI, h_scale, num_pairs, order_N, inner,
                                     ring, 0, K, DEPTH, ACTIVATION)),
                (gather_and_load, (x_TD, x_stride, w_desc, order_N, tile_3M, max_tiles, num_tiles, num_blocks, inner,
                                   head + 1, ring, K, DEPTH, BAND, 0, False)),
            ],
            [4], [56],
        )


@gluon.jit(do_not_specialize=["max_tiles", "num_pairs"])
def down_hopper_fp8(
    weight_N, h_desc, h_scale, num_pairs, w_desc, scale, rows_ND, order_N, tile_3M, head, max_tiles, D,
    BN: gl.constexpr, BK: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """rows[pair, columns] = weight · (down · h); DEPTH is I, weights are in tile order."""
    ring = make_ring(w_desc, GROUPS, BN, BK, STAGES, GROUPS, 0, 1)
    gdc_launch_dependents()
    num_tiles = gl.load(head)
    num_blocks = gl.cdiv(D, BN)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (down_warpgroup, (h_scale, num_pairs, scale, weight_N, rows_ND, order_N, D, ring, 0, DEPTH)),
                (down_warpgroup, (h_scale, num_pairs, scale, weight_N, rows_ND, order_N, D, ring, 1, DEPTH)),
                (load_rows, (h_desc, h_desc, w_desc, tile_3M, max_tiles, num_tiles, num_blocks, D, head + 2, ring,
                             DEPTH, BAND, 0)),
            ],
            [4, 1], [224, 40],
        )
    else:
        gl.warp_specialize(
            [
                (down_warpgroup, (h_scale, num_pairs, scale, weight_N, rows_ND, order_N, D, ring, 0, DEPTH)),
                (load_rows, (h_desc, h_desc, w_desc, tile_3M, max_tiles, num_tiles, num_blocks, D, head + 2, ring,
                             DEPTH, BAND, 0)),
            ],
            [1], [40],
        )
