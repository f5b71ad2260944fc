"""Experts with weights of 4 bits on Hopper, from a few tokens on.

T tokens, D hidden width, K experts per token, I expert width (`inner`), N = T · K pairs, M tiles, R rows of a tile.

Like experts_hopper, with operands swapped: weights are the rows of a product and tokens its columns, so a tile of a few
tokens costs little. Packed weights go from shared memory to the registers that the matrix unit reads, and become bf16
on the way: see experts_hopper_unpack. A stage has 128 inputs. Each of two warpgroups has 128 rows of weights: 64 of
gate and 64 of up, or 128 of down.

INT4: the inputs of a stage share a scale. Their sum starts from zero, and is multiplied by the scale and added in fp32
on ordinary cores.

MXFP4: scales are multiplied into the weights, so sums stay in the matrix unit, and one product runs while the weights
of the next are unpacked. The last stage may reach beyond the last input, where weights and activations are zeros.

Rows of activations may be in two parts: see experts_hopper_split. Then scales come with the weights of a stage, from a
copy in which those of neighbouring outputs follow each other, instead of by loads of two bytes (RING).

Not supported: groups of other sizes than these, inputs that are no multiple of 128, or for MXFP4 of 64, and zero points
with RING.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.compiling.gluon_names import thread_load, tma_load
from anabranch.kernels.triton.experts_hopper_split import (
    blocks,
    byte_descriptor,
    has_scales,
    multiply_split_fp4,
    multiply_split_int4,
    place_of,
    split_descriptor,
)
from anabranch.kernels.triton.experts_hopper_unpack import OUTPUTS, multiply_parts, multiply_scaled
from anabranch.kernels.triton.experts_ring import locate, publish_tile, read_tile
from anabranch.kernels.triton.gated import activate

PACKED = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
ROWS = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
"""How packed weights and rows of activations lie in shared memory."""


def weight_descriptor(tensor: torch.Tensor, rows: int, split: bool = False) -> TensorDescriptor:
    """Two bytes at a time, or one for activations in two parts."""
    if split:
        return byte_descriptor(tensor, rows)
    return TensorDescriptor.from_tensor(tensor.view(torch.int16).view(-1, tensor.shape[-1] // 2), [rows, 32], PACKED)


def scales(tensor: torch.Tensor) -> torch.Tensor:
    """Scales as the kernels take them: bytes, which are MXFP4's, two at a time."""
    return tensor.view(torch.uint16) if tensor.dtype == torch.uint8 else tensor


def scales_by_input(tensor: torch.Tensor) -> torch.Tensor:
    """[experts, stages, outputs]: scales of 128 inputs, which of MXFP4 are four bytes, so that those of neighbouring
    outputs follow each other. A copy."""
    if tensor.dtype == torch.uint8:
        tensor = torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % 4)).view(torch.int32)
    return tensor.transpose(1, 2).contiguous()


def row_descriptor(tensor: torch.Tensor, rows: int, parts: int = 0) -> TensorDescriptor:
    return split_descriptor(tensor, rows, parts) if parts else TensorDescriptor.from_tensor(tensor, [rows, 64], ROWS)


# Partitions have long parameter lists; one name per line would hide what they do.
# fmt: off

@gluon.constexpr_function
def is_fp4(dtype):
    """By the dtype of scales: two bytes, or four where they come with the weights."""
    return dtype == gl.uint16 or dtype == gl.int32


@gluon.jit
def make_ring(
    w_desc, scale, BN: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, ARRIVALS: gl.constexpr,
    PARTS: gl.constexpr, RING: gl.constexpr,
):
    """For each stage BN rows of packed weights, two bytes in a number, and both halves of R rows, or (PARTS) one byte
    and both parts of R rows. See experts_ring."""
    if PARTS:
        w_ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BN, 64], w_desc.layout)
        x_split: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128 // PARTS, element_bitwidth=8, rank=3)
        x_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, PARTS, R, 128 // PARTS], x_split)
    else:
        w_ring = gl.allocate_shared_memory(gl.int16, [STAGES, BN, 32], w_desc.layout)
        x_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        x_ring = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, R, 64], x_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    plain: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    tile_info = gl.allocate_shared_memory(gl.int32, [STAGES, 4], plain)
    s_ring = gl.allocate_shared_memory(scale.dtype.element_ty, [STAGES, BN], plain) if RING else tile_info
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(empty.index(stage), count=2)
    return w_ring, x_ring, s_ring, full, empty, tile_info


@gluon.jit
def multiply(ring, step, scale, zero, left, right, sums, LEFT: gl.constexpr, RIGHT: gl.constexpr,
             DEPTH: gl.constexpr, GATHERED: gl.constexpr):
    """Products of 64 outputs from row LEFT of a stage on and 64 from row RIGHT on, and the next step. `left` and
    `right`: each output's row of weights."""
    G: gl.constexpr = DEPTH // (64 if is_fp4(scale.dtype.element_ty) else 128)
    if ring[1].dtype == gl.float8e4nv:
        if is_fp4(scale.dtype.element_ty):
            return multiply_split_fp4(ring, step, LEFT, RIGHT, DEPTH, GATHERED)
        else:
            return multiply_split_int4(
                ring, step, scale, zero, left * G, right * G, sums, LEFT, RIGHT, DEPTH, GATHERED,
            )
    elif is_fp4(scale.dtype.element_ty):
        return multiply_scaled(ring, step, scale, left * G, right * G, LEFT, RIGHT, DEPTH, GATHERED)
    else:
        return multiply_parts(ring, step, scale, zero, left * G, right * G, LEFT, RIGHT, DEPTH, GATHERED)


@gluon.jit
def finish(acc, scale, bias, factor):
    """The sums of products of 64 outputs, plus their biases. `factor`: of each row that is in two parts."""
    if factor is not None:
        acc *= (factor * (64.0 if is_fp4(scale.dtype.element_ty) else 512.0))[None, :]  # see unpack_*
    elif is_fp4(scale.dtype.element_ty):
        acc *= 18446744073709551616.0  # 2⁶⁴, see experts_hopper_unpack
    return acc if bias is None else acc + bias.to(gl.float32)[:, None]


@gluon.jit
def gate_up_warpgroup(
    scale, zero, bias, x_scale, x_sum, order_N, h_NI, inner, ring,
    WHO: gl.constexpr, DEPTH: gl.constexpr, ACTIVATION: gl.constexpr, K: gl.constexpr,
):
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    BN: gl.constexpr = w_ring.shape[1] // 2
    R: gl.constexpr = x_ring.shape[-2]
    SPLIT: gl.constexpr = x_ring.dtype == gl.float8e4nv
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32 if SPLIT else 16])
    out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    own: gl.constexpr = is_fp4(scale.dtype.element_ty) and not SPLIT
    of_scale: gl.constexpr = OUTPUTS if own else gl.SliceLayout(1, layout)
    r = gl.arange(0, R, gl.SliceLayout(0, layout))
    f = gl.arange(0, 64, gl.SliceLayout(1, layout)) + WHO * 64
    f_scale = gl.arange(0, 64, of_scale) + WHO * 64
    out_r = gl.arange(0, R, gl.SliceLayout(1, out))
    out_c = gl.arange(0, 64, gl.SliceLayout(0, out)) + WHO * 64
    step = 0
    block, begin, end, expert = read_tile(tile_info, full, step)
    while block >= 0:
        # Columns after the last one repeat it and are not stored.
        row = expert * (2 * inner) + gl.minimum(block * BN + f_scale, inner - 1)
        place = expert * (2 * inner) + gl.minimum(block * BN + f, inner - 1)
        gate_bias = None if bias is None else gl.load(bias + place)
        up_bias = None if bias is None else gl.load(bias + place + inner)
        factor, sums = None, None
        if SPLIT:
            token = gl.load(order_N + begin + r, mask=begin + r < end, other=0) // K
            factor, sums = gl.load(x_scale + token), x_sum + token * (DEPTH // 128)
        gate, up, step = multiply(
            ring, step, scale, zero, row, row + inner, sums, WHO * 64, BN + WHO * 64, DEPTH, True,
        )
        gate, up = finish(gate, scale, gate_bias, factor), finish(up, scale, up_bias, factor)
        h = activate(gate, up, ACTIVATION).to(h_NI.dtype.element_ty)
        h = gl.convert_layout(gl.permute(h, [1, 0]), out)
        column = block * BN + out_c
        pointer = h_NI + (begin + out_r).to(gl.int64)[:, None] * inner + column[None, :]
        gl.store(pointer, h, mask=(begin + out_r < end)[:, None] & (column < inner)[None, :])
        block, begin, end, expert = read_tile(tile_info, full, step)


@gluon.jit
def store_columns(acc, weight, pair, rows_ND, first_column, D, out: gl.constexpr):
    """64 columns of weighted rows, each to its pair."""
    column = first_column + gl.arange(0, 64, gl.SliceLayout(0, out))
    value = gl.convert_layout(gl.permute((acc * weight[None, :]).to(rows_ND.dtype.element_ty), [1, 0]), out)
    pointer = rows_ND + pair.to(gl.int64)[:, None] * D + column[None, :]
    gl.store(pointer, value, mask=(pair >= 0)[:, None] & (column < D)[None, :])


@gluon.jit
def down_warpgroup(
    scale, zero, bias, h_scale, h_sum, weight_N, rows_ND, order_N, D, ring,
    WHO: gl.constexpr, DEPTH: gl.constexpr,
):
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    BN: gl.constexpr = w_ring.shape[1]
    R: gl.constexpr = x_ring.shape[-2]
    SPLIT: gl.constexpr = x_ring.dtype == gl.float8e4nv
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32 if SPLIT else 16])
    out: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    own: gl.constexpr = is_fp4(scale.dtype.element_ty) and not SPLIT
    of_scale: gl.constexpr = OUTPUTS if own else gl.SliceLayout(1, layout)
    f = gl.arange(0, 64, gl.SliceLayout(1, layout)) + WHO * 128
    f_scale = gl.arange(0, 64, of_scale) + WHO * 128
    out_r = gl.arange(0, R, gl.SliceLayout(1, out))
    r = gl.arange(0, R, gl.SliceLayout(0, layout))
    step = 0
    block, begin, end, expert = read_tile(tile_info, full, step)
    while block >= 0:
        if R <= 64:  # early, where registers hold them during the product
            pair = gl.load(order_N + begin + out_r, mask=begin + out_r < end, other=-1)
            weight = gl.load(weight_N + begin + r, mask=begin + r < end, other=0.0)
        first, place = block * BN + f_scale, block * BN + f
        left_bias = None if bias is None else gl.load(bias + expert * D + gl.minimum(place, D - 1))
        right_bias = None if bias is None else gl.load(bias + expert * D + gl.minimum(place + 64, D - 1))
        factor, sums = None, None
        if SPLIT:
            at = gl.minimum(begin + r, end - 1)
            factor, sums = gl.load(h_scale + at), h_sum + at * (DEPTH // 128)
        left, right, step = multiply(
            ring, step, scale, zero, expert * D + gl.minimum(first, D - 1), expert * D + gl.minimum(first + 64, D - 1),
            sums, WHO * 128, WHO * 128 + 64, DEPTH, False,
        )
        if R > 64:
            pair = gl.load(order_N + begin + out_r, mask=begin + out_r < end, other=-1)
            weight = gl.load(weight_N + begin + r, mask=begin + r < end, other=0.0)
        column = block * BN + WHO * 128
        left = finish(left, scale, left_bias, factor)
        store_columns(left, weight, pair, rows_ND, column, D, out)
        right = finish(right, scale, right_bias, factor)
        store_columns(right, weight, pair, rows_ND, column + 64, D, out)
        block, begin, end, expert = read_tile(tile_info, full, step)


@gluon.jit
def prefetch(scale, zero, first, end, DEPTH: gl.constexpr, ROWS: gl.constexpr):
    """Scales and zero points of ROWS rows from `first` on, not from `end` on: memory takes longer than one stage."""
    G: gl.constexpr = DEPTH // (64 if is_fp4(scale.dtype.element_ty) else 128)
    place = first * G + 64 * gl.arange(0, 32 * gl.num_warps(), gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for begin in gl.static_range(0, ROWS * G, 2048 * gl.num_warps()):  # a thread: 64 scales, 128 bytes
        at = gl.minimum(place + begin, end * G - 1)
        for which in gl.static_range(1 if zero is None else 2):
            pointer = (zero if which else scale) + at
            gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer], gl.int32, False, 1)


@gluon.jit
def gather_depth(
    x_TD, w_desc, scale, scaled, offset, d, real, first, inner, step, ring,
    DEPTH: gl.constexpr, BEGIN: gl.constexpr, END: gl.constexpr,
):
    """Fill a stage for every 128 inputs from BEGIN to END. `scale`: the first scales of each output, where they come
    with the weights; `scaled`: which outputs are there."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    BN: gl.constexpr = w_ring.shape[1] // 2
    for k in range(BEGIN, END, 128):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, 2 * BN * 64)
        w = w_ring.index(stage)
        column = k * w_ring.shape[2] // 128
        tma_load(w_desc, [first, column], bar, w.slice(0, BN, dim=0))
        tma_load(w_desc, [first + inner, column], bar, w.slice(BN, BN, dim=0))
        if x_ring.dtype == gl.float8e4nv:  # both parts; beyond the last input, zeros
            inside = real
            if DEPTH % 128 != 0:
                inside = real & (d + k < DEPTH)
            thread_load(x_ring.index(2 * stage), x_TD + (offset + k), mask=inside)
            thread_load(x_ring.index(2 * stage + 1), x_TD + (offset + k + DEPTH), mask=inside)
        else:
            thread_load(x_ring.index(2 * stage), x_TD + (offset + k), mask=real)
            inside = real
            if DEPTH % 128 != 0:  # beyond the last input, zeros
                inside = real & (k + 64 < DEPTH)
            thread_load(x_ring.index(2 * stage + 1), x_TD + (offset + k + 64), mask=inside)
        if has_scales(s_ring):
            thread_load(s_ring.index(stage), scale + k // 128 * (2 * inner), mask=scaled)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def column_of(values, SPLIT: gl.constexpr):
    """A value for each row, in front of whose dimension there is another where rows are in two parts."""
    return gl.expand_dims(gl.expand_dims(values, 0), 2) if SPLIT else gl.expand_dims(values, 1)


@gluon.jit
def gather_and_load(
    x_TD, x_stride, w_desc, scale, zero, order_N, tile_3M, max_tiles, num_tiles, num_blocks, inner, counter, ring,
    K: gl.constexpr, DEPTH: gl.constexpr, BAND: gl.constexpr,
):
    """The loading warps of the gate/up product."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    BN: gl.constexpr = w_ring.shape[1] // 2
    R: gl.constexpr = x_ring.shape[-2]
    HEAD: gl.constexpr = STAGES * 128 if STAGES * 128 < DEPTH else DEPTH
    SPLIT: gl.constexpr = x_ring.dtype == gl.float8e4nv
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    split: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, blocks(x_ring.shape[1] if SPLIT else 1)))
    r = gl.arange(0, R, split if SPLIT else gl.SliceLayout(1, layout))
    d = place_of(x_ring) if SPLIT else gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    RING: gl.constexpr = has_scales(s_ring)
    s_c = gl.arange(0, 2 * BN, gl.BlockedLayout([2], [32], [4], [0]))  # of a stage's outputs: gate, then up
    step = 0
    index = gl.program_id(0)
    block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
    pair = gl.load(order_N + begin + r, mask=begin + r < end, other=0)
    while index < num_tiles * num_blocks:
        publish_tile(tile_info, empty, step, block, begin, end, expert)
        offset = column_of(pair // K, SPLIT) * x_stride + d
        real = column_of(begin + r < end, SPLIT)
        first = expert * (2 * inner) + block * BN
        scales_at, scaled = None, None
        if RING:
            column = block * BN + s_c % BN
            scales_at = scale + expert * ((DEPTH + 127) // 128 * 2 * inner) + s_c // BN * inner + column
            scaled = column < inner
        else:
            prefetch(scale, zero, first, (2 * expert + 1) * inner, DEPTH, BN)
            prefetch(scale, zero, first + inner, (2 * expert + 2) * inner, DEPTH, BN)
        step = gather_depth(
            x_TD, w_desc, scales_at, scaled, offset, d, real, first, inner, step, ring, DEPTH, 0, HEAD,
        )
        index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
        pair = gl.load(order_N + begin + r, mask=begin + r < end, other=0)
        step = gather_depth(
            x_TD, w_desc, scales_at, scaled, offset, d, real, first, inner, step, ring, DEPTH, HEAD, DEPTH,
        )
    publish_tile(tile_info, empty, step, -1, 0, 0, 0)
    mbarrier.expect(full.index(step % STAGES), 0)
    async_copy.mbarrier_arrive(full.index(step % STAGES), increment_count=False)


@gluon.jit
def load_depth(h_desc, w_desc, scale, scaled, D, first, row, step, ring, DEPTH: gl.constexpr, BEGIN: gl.constexpr,
               END: gl.constexpr, EARLY: gl.constexpr):
    """Fill a stage for every 128 inputs from BEGIN to END; the first EARLY steps have their weights already. `scale`,
    `scaled`: as in gather_depth."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    BN: gl.constexpr = w_ring.shape[1]
    R: gl.constexpr = x_ring.shape[-2]
    for k in range(BEGIN, END, 128):
        stage = step % STAGES
        bar = full.index(stage)
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BN * 64 + R * 256)
        tma_load(w_desc, [first, k * w_ring.shape[2] // 128], bar, w_ring.index(stage), pred=step >= EARLY)
        if x_ring.dtype == gl.float8e4nv:
            W: gl.constexpr = x_ring.shape[3]
            tma_load(h_desc, [k // W, row, 0], bar, x_ring.index(2 * stage))
            tma_load(h_desc, [(k + DEPTH) // W, row, 0], bar, x_ring.index(2 * stage + 1))
        else:
            tma_load(h_desc, [row, k], bar, x_ring.index(2 * stage))
            tma_load(h_desc, [row, k + 64], bar, x_ring.index(2 * stage + 1))
        if has_scales(s_ring):
            thread_load(s_ring.index(stage), scale + k // 128 * D, mask=scaled)
            async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def load_rows(
    h_desc, w_desc, scale, zero, tile_3M, max_tiles, num_tiles, num_blocks, D, counter, ring,
    DEPTH: gl.constexpr, BAND: gl.constexpr,
):
    """The loading warp of the down product: rows of h are in tile order. The first weights are loaded before the
    gate/up kernel has finished; h is read after that."""
    w_ring, x_ring, s_ring, full, empty, tile_info = ring
    STAGES: gl.constexpr = w_ring.shape[0]
    BN: gl.constexpr = w_ring.shape[1]
    HEAD: gl.constexpr = STAGES * 128 if STAGES * 128 < DEPTH else DEPTH
    EARLY: gl.constexpr = (HEAD + 127) // 128
    RING: gl.constexpr = has_scales(s_ring)
    s_c = gl.arange(0, BN, gl.BlockedLayout([4], [32], [1], [0]))
    step = 0
    index = gl.program_id(0)
    block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
    for early in gl.static_range(EARLY):
        tma_load(
            w_desc, [expert * D + block * BN, early * w_ring.shape[2]], full.index(early), w_ring.index(early),
            pred=index < num_tiles * num_blocks,
        )
    gdc_wait()
    while index < num_tiles * num_blocks:
        publish_tile(tile_info, empty, step, block, begin, end, expert)
        first, row = expert * D + block * BN, begin
        scales_at, scaled = None, None
        if RING:
            column = block * BN + s_c
            scales_at, scaled = scale + expert * ((DEPTH + 127) // 128 * D) + column, column < D
        else:
            prefetch(scale, zero, first, (expert + 1) * D, DEPTH, BN)
        step = load_depth(h_desc, w_desc, scales_at, scaled, D, first, row, step, ring, DEPTH, 0, HEAD, EARLY)
        index = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        block, expert, begin, end = locate(index, tile_3M, max_tiles, num_tiles, num_blocks, BAND)
        step = load_depth(h_desc, w_desc, scales_at, scaled, D, first, row, step, ring, DEPTH, HEAD, DEPTH, EARLY)
    publish_tile(tile_info, empty, step, -1, 0, 0, 0)
    mbarrier.expect(full.index(step % STAGES), 0)
    if RING:
        async_copy.mbarrier_arrive(full.index(step % STAGES), increment_count=False)


@gluon.jit(do_not_specialize=["max_tiles"])
def gate_up_hopper_packed(
    x_TD, x_stride, x_scale, x_sum, w_desc, scale, zero, bias, h_NI, order_N, tile_3M, head, max_tiles, inner,
    K: gl.constexpr, R: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    BAND: gl.constexpr, ACTIVATION: gl.constexpr, PARTS: gl.constexpr, RING: gl.constexpr,
):
    """h[row, columns] = activation(gate · x) · (up · x); DEPTH is D."""
    BN: gl.constexpr = 128
    ring = make_ring(w_desc, scale, 2 * BN, R, STAGES, 129, PARTS, RING)
    gdc_wait()
    gdc_launch_dependents()
    num_tiles = gl.load(head)
    num_blocks = gl.cdiv(inner, BN)
    gl.warp_specialize(
        [
            (gate_up_warpgroup, (scale, zero, bias, x_scale, x_sum, order_N, h_NI, inner, ring, 0, DEPTH, ACTIVATION,
                                 K)),
            (gate_up_warpgroup, (scale, zero, bias, x_scale, x_sum, order_N, h_NI, inner, ring, 1, DEPTH, ACTIVATION,
                                 K)),
            (gather_and_load, (x_TD, x_stride, w_desc, scale, zero, order_N, tile_3M, max_tiles, num_tiles, num_blocks,
                               inner, head + 1, ring, K, DEPTH, BAND)),
        ],
        [4, 4], [216, 72] if PARTS and R <= 32 else [224, 56],
    )


@gluon.jit(do_not_specialize=["max_tiles"])
def down_hopper_packed(
    weight_N, h_desc, h_scale, h_sum, w_desc, scale, zero, bias, rows_ND, order_N, tile_3M, head, max_tiles, D,
    R: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, BAND: gl.constexpr, PARTS: gl.constexpr,
    RING: gl.constexpr,
):
    """rows[pair, columns] = weight · (down · h); DEPTH is I, weights are in tile order."""
    BN: gl.constexpr = 256
    ring = make_ring(w_desc, scale, BN, R, STAGES, 33 if RING else 1, PARTS, RING)
    gdc_launch_dependents()
    num_tiles = gl.load(head)
    num_blocks = gl.cdiv(D, BN)
    gl.warp_specialize(
        [
            (down_warpgroup, (scale, zero, bias, h_scale, h_sum, weight_N, rows_ND, order_N, D, ring, 0, DEPTH)),
            (down_warpgroup, (scale, zero, bias, h_scale, h_sum, weight_N, rows_ND, order_N, D, ring, 1, DEPTH)),
            (load_rows, (h_desc, w_desc, scale, zero, tile_3M, max_tiles, num_tiles, num_blocks, D, head + 2, ring,
                         DEPTH, BAND)),
        ],
        [4, 1], [224, 40],
    )
