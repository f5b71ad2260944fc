"""Dense projections with weights and activations in FP8, for up to 128 tokens on Hopper.

T tokens, D inputs, F outputs, G groups of 128 inputs. Like linear_hopper: weights are split into items of TILE outputs
and 128 inputs, a program takes P items of the same outputs, and its copy engine loads them all before the wait for the
previous kernel. Each item has one scale for its weights and one for each token; its product starts from zero, and is
multiplied by both and added in fp32. Programs exchange their parts of a tile as in linear_hopper.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.compiling.gluon_names import barrier, tma_load
from anabranch.kernels.triton.experts_hopper_fp8 import load_scale
from anabranch.kernels.triton.launch import cdiv, num_processors
from anabranch.kernels.triton.linear_hopper import add_parts, counts
from anabranch.kernels.triton.quantize_rows import GROUP, quantize_rows
from anabranch.ops.weight import Weight

TILES = (64, 128)
"""Outputs of an item: the first with which all weights fit in the multiprocessors' shared memory."""
BLOCKS = (16, 32, 64, 128)
"""Padded numbers of tokens: columns of a product. Each is a version of the kernel."""
SHARED_BYTES = 216 << 10
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@functools.cache
def split(D: int, F: int, block: int, processors: int) -> tuple[int, int] | None:
    """(TILE, P) with at most one program per multiprocessor; None if that does not fit."""
    items = cdiv(D, GROUP)
    for tile in TILES:
        parts = processors // cdiv(F, tile)
        if parts and cdiv(items, parts) * (tile + block) * GROUP <= SHARED_BYTES and (tile, block) != (128, 128):
            return tile, cdiv(items, parts)
    return None


# Long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def multiply_items(
    w_desc, x_desc, scale, x_scale, x_scale_stride, tile, first, num_groups, num_tokens, P: gl.constexpr,
):
    """P items of a tile times x: [TILE, TP]. The copy engine fills items after the last input with zeros."""
    TILE: gl.constexpr = w_desc.block_shape[0]
    DEPTH: gl.constexpr = w_desc.block_shape[1]
    TP: gl.constexpr = x_desc.block_shape[0]
    w = gl.allocate_shared_memory(w_desc.dtype, [P, TILE, DEPTH], w_desc.layout)
    x = gl.allocate_shared_memory(x_desc.dtype, [P, TP, DEPTH], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [P, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(P):
        mbarrier.init(full.index(n), count=1)
    for n in gl.static_range(P):
        mbarrier.expect(full.index(n), (TILE + TP) * DEPTH)
    for n in gl.static_range(P):
        tma_load(w_desc, [tile * TILE, (first + n) * DEPTH], full.index(n), w.index(n))
    w_scale = ()
    for n in gl.static_range(P):
        group = gl.minimum(first + n, num_groups - 1)
        w_scale = w_scale + (load_scale(scale + tile * TILE // 128 * num_groups + group),)
    gdc_wait()
    gdc_launch_dependents()
    for n in gl.static_range(P):
        tma_load(x_desc, [0, (first + n) * DEPTH], full.index(n), x.index(n))
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [TILE // 16, 1], [16, TP, 32])
    t = gl.minimum(gl.arange(0, TP, gl.SliceLayout(0, layout)), num_tokens - 1)
    acc = gl.zeros([TILE, TP], gl.float32, layout)
    # Products under way at the same time: as many as there are registers for.
    MANY: gl.constexpr = 4 if TP <= 32 else 2 if TP <= 64 else 1
    for begin in gl.static_range(0, P, MANY):
        by = ()
        for n in gl.static_range(begin, min(begin + MANY, P)):
            group = gl.minimum(first + n, num_groups - 1)
            by = by + (gl.load(x_scale + group * x_scale_stride + t) * w_scale[n],)
        parts = ()
        for n in gl.static_range(begin, min(begin + MANY, P)):
            mbarrier.wait(full.index(n), 0)
            none = gl.zeros([TILE, TP], gl.float32, layout)
            part = warpgroup_mma(w.index(n), x.index(n).permute([1, 0]), none, use_acc=False, is_async=True)
            parts = parts + (part,)
        if len(by) == 1:
            parts = (warpgroup_mma_wait(0, deps=parts),)
        else:
            parts = warpgroup_mma_wait(0, deps=parts)
        for i in gl.static_range(len(by)):
            acc += parts[i] * by[i][None, :]
    return acc


@gluon.jit(do_not_specialize=["num_tokens", "x_scale_stride"])
def split_rows_hopper_fp8(
    w_desc, x_desc, scale, x_scale, x_scale_stride, bias_F, y_TF, part, count, num_outputs, num_groups, num_tokens,
    P: gl.constexpr, PARTS: gl.constexpr,
):
    """P items of a tile, and the sum of all parts in the last program; PARTS programs share a tile."""
    TILE: gl.constexpr = w_desc.block_shape[0]
    TP: gl.constexpr = x_desc.block_shape[0]
    who = gl.program_id(0)
    tile = who // PARTS
    acc = multiply_items(
        w_desc, x_desc, scale, x_scale, x_scale_stride, tile, who % PARTS * P, num_groups, num_tokens, P
    )
    r = gl.arange(0, TILE, gl.SliceLayout(1, acc.type.layout))[:, None]
    t = gl.arange(0, TP, gl.SliceLayout(0, acc.type.layout))[None, :]
    if PARTS == 1:
        output = tile * TILE + r
        if bias_F is not None:
            acc += gl.load(bias_F + output, mask=output < num_outputs, other=0.0).to(gl.float32)
        mask = (t < num_tokens) & (output < num_outputs)
        gl.store(y_TF + (t * num_outputs + output), acc.to(y_TF.dtype.element_ty), mask=mask)
        return
    gl.store(part + who * (TILE * TP) + (t * TILE + r), acc, mask=t < num_tokens)
    barrier()  # one thread counts for all, after all have stored
    arrived = gl.atomic_add(count + tile, 1, sem="acq_rel")
    if arrived == PARTS - 1:
        add_parts(part, bias_F, y_TF, tile, num_outputs, num_tokens, TILE, TP, PARTS)
        gl.store(count + tile, 0)


# fmt: on


def takes(x_TD: torch.Tensor, weight_FD: Weight) -> bool:
    """Whether `run` supports these tensors; the copy engine needs rows aligned to 16 bytes."""
    tokens, (F, D) = x_TD.shape[0], weight_FD.shape
    return (
        0 < tokens <= BLOCKS[-1]
        and x_TD.element_size() == 2
        and D % 16 == 0
        and weight_FD.data.data_ptr() % 16 == 0
        and split(D, F, block_of(tokens), num_processors(x_TD.device)) is not None
    )


def block_of(tokens: int) -> int:
    return next(block for block in BLOCKS if tokens <= block)


def run(x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    (tokens, D), F, device = x_TD.shape, weight_FD.shape[0], x_TD.device
    block = block_of(tokens)
    found = split(D, F, block, num_processors(device))
    assert found is not None
    tile, items = found
    tiles, parts = cdiv(F, tile), cdiv(cdiv(D, GROUP), items)
    q_TD, scale_GT = quantize_rows(x_TD)
    y_TF = torch.empty(tokens, F, dtype=out_dtype, device=device)
    part = torch.empty(tiles * parts if parts > 1 else 0, block, tile, dtype=torch.float32, device=device)
    split_rows_hopper_fp8[(tiles * parts,)](
        TensorDescriptor.from_tensor(weight_FD.data, [tile, GROUP], SHARED),
        TensorDescriptor.from_tensor(q_TD, [block, GROUP], SHARED), weight_FD.tensors["scale"], scale_GT,
        scale_GT.shape[1], bias_F, y_TF, part, counts(device), F, cdiv(D, GROUP), tokens,
        P=items, PARTS=parts, num_warps=tile // 16, launch_pdl=True,
    )  # fmt: skip
    return y_TF
