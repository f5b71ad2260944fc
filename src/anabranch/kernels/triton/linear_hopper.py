"""Dense projections of up to 32 tokens on Hopper: weights are loaded into shared memory before the input is complete.

T tokens, D inputs, F outputs. A program with few outputs and all inputs would read all of x, which from a dozen tokens
on is more than its weights. So weights are split into items of 64 outputs and 256 inputs; items of the same outputs are
a tile, and each program takes P consecutive items of a tile: 4096 → 2048 is 32 tiles of 16 items, and 128 programs take
4 each. There is at most one program per multiprocessor, so the copy engine loads all weights at once, before the wait
for the previous kernel: they are parameters. After the wait only x is read, from L2.

Programs exchange their parts of a tile through L2, in fp32. The last one to store a part adds them all in the order of
inputs, so that sums do not depend on which is last. Arrivals are counted; the last one resets the count for the next
launch.

`linear` decides when this file is used. Not supported: fp32, rows that are not aligned to 16 bytes, weights that do not
fit into the shared memory of all multiprocessors together.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.kernels.compiling.gluon_names import barrier, tma_load
from anabranch.kernels.triton.launch import cdiv, lasting_zeros, num_processors

TILE, DEPTH = 64, 256
"""Outputs and inputs of an item. 64: the least that a warpgroup multiplies. 256: faster than 128 on an H200."""
BLOCKS = (16, 32)
"""Padded numbers of tokens: columns of a product. Each is a version of the kernel."""
MOST_ITEMS = 4
"""Of a program: with x for 32 tokens they take 192 KB of shared memory; a fifth would not fit."""
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@functools.cache
def items_of_program(D: int, F: int, processors: int) -> int | None:
    """P: the least with at most one program per multiprocessor; None if there are more even with MOST_ITEMS."""
    for items in range(1, MOST_ITEMS + 1):
        if cdiv(F, TILE) * cdiv(cdiv(D, DEPTH), items) <= processors:
            return items
    return None


# Long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def multiply_items(w_desc, x_desc, tile, first, P: gl.constexpr):
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
        mbarrier.expect(full.index(n), (TILE + TP) * DEPTH * 2)
    for n in gl.static_range(P):
        tma_load(w_desc, [tile * TILE, (first + n) * DEPTH], full.index(n), w.index(n))
    gdc_wait()
    gdc_launch_dependents()
    for n in gl.static_range(P):
        tma_load(x_desc, [0, (first + n) * DEPTH], full.index(n), x.index(n))
    acc = gl.zeros([TILE, TP], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TP, 16]))
    for n in range(P):
        mbarrier.wait(full.index(n), 0)
        acc = warpgroup_mma(w.index(n), x.index(n).permute([1, 0]), acc, use_acc=n > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def add_parts(
    part, bias_F, y_TF, tile, num_outputs, num_tokens, TILE: gl.constexpr, TP: gl.constexpr, PARTS: gl.constexpr,
):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    t = gl.arange(0, TP, gl.SliceLayout(1, layout))[:, None]
    r = gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    sum_TR = gl.zeros([TP, TILE], gl.float32, layout)
    for j in gl.static_range(PARTS):
        place = part + (tile * PARTS + j) * (TILE * TP) + (t * TILE + r)
        # Not through L1, which does not see what other programs wrote.
        sum_TR += gl.load(place, mask=(t < num_tokens) & (r < TILE), other=0.0, cache_modifier=".cg")
    output = tile * TILE + r
    if bias_F is not None:
        sum_TR += gl.load(bias_F + output, mask=output < num_outputs, other=0.0).to(gl.float32)
    mask = (t < num_tokens) & (output < num_outputs)
    gl.store(y_TF + (t * num_outputs + output), sum_TR.to(y_TF.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["num_tokens"])
def split_rows_hopper(
    w_desc, x_desc, bias_F, y_TF, part, count, num_outputs, num_tokens, P: gl.constexpr, PARTS: gl.constexpr,
):
    """P items of a tile, and the sum of all parts in the last program; PARTS programs share a tile."""
    TILE: gl.constexpr = w_desc.block_shape[0]
    TP: gl.constexpr = x_desc.block_shape[0]
    who = gl.program_id(0)
    tile = who // PARTS
    acc = multiply_items(w_desc, x_desc, tile, who % PARTS * P, P)
    r = gl.arange(0, TILE, gl.SliceLayout(1, acc.type.layout))[:, None]
    t = gl.arange(0, TP, gl.SliceLayout(0, acc.type.layout))[None, :]
    gl.store(part + who * (TILE * TP) + (t * TILE + r), acc, mask=t < num_tokens)
    barrier()  # one thread counts for all, after all have stored
    arrived = gl.atomic_add(count + tile, 1, sem="acq_rel")
    if arrived == PARTS - 1:
        add_parts(part, bias_F, y_TF, tile, num_outputs, num_tokens, TILE, TP, PARTS)
        gl.store(count + tile, 0)


# fmt: on


@functools.cache
def counts(device: torch.device) -> torch.Tensor:
    """Arrivals at each tile: zeros between launches, which share them. So launches on a device must not overlap, and
    they do not: a launch counts after its wait, and of what a step runs in parallel (a shared expert; router and
    experts) only one has products of this size. Two models running on one device need a process each."""
    return lasting_zeros(device, num_processors(device))


def takes(x_TD: torch.Tensor, weight_FD: torch.Tensor) -> bool:
    """Whether `run` supports these tensors; the copy engine needs rows aligned to 16 bytes."""
    (tokens, D), F = x_TD.shape, weight_FD.shape[0]
    rows = (x_TD, weight_FD)
    return (
        0 < tokens <= max(BLOCKS)
        and x_TD.element_size() == 2
        and all(row.data_ptr() % 16 == 0 and row.stride(0) % 8 == 0 and row.stride(0) >= D for row in rows)
        and items_of_program(D, F, num_processors(x_TD.device)) is not None
    )


def run(
    x_TD: torch.Tensor, weight_FD: torch.Tensor, bias_F: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    (tokens, D), F, device = x_TD.shape, weight_FD.shape[0], x_TD.device
    items = items_of_program(D, F, num_processors(device))
    assert items is not None
    tiles, parts, block = cdiv(F, TILE), cdiv(cdiv(D, DEPTH), items), next(b for b in BLOCKS if tokens <= b)
    y_TF = torch.empty(tokens, F, dtype=out_dtype, device=device)
    split_rows_hopper[(tiles * parts,)](
        TensorDescriptor.from_tensor(weight_FD, [TILE, DEPTH], SHARED),
        TensorDescriptor.from_tensor(x_TD, [block, DEPTH], SHARED),
        bias_F, y_TF, torch.empty(tiles * parts, block, TILE, dtype=torch.float32, device=device), counts(device),
        F, tokens, P=items, PARTS=parts, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y_TF
