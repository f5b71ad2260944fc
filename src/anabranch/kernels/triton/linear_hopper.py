"""Dense projections of up to 32 tokens on Hopper: a program's weights lie in shared memory before its input is there.

T tokens, D inputs, F outputs. A program that has few outputs and all inputs reads all of x, which from a dozen tokens
on is more than its weights. So weights are cut into items of 64 outputs and 256 inputs; items of the same outputs are a
tile, and each program takes P neighbours of a tile: 4096 → 2048 are 32 tiles of 16 items, and 128 programs have 4 each.
There is at most one program for each multiprocessor. So all weights are asked for at once, by the copy engine, and
before the wait for the kernel before: they are parameters. Behind the wait only x is read, which is in L2.

What a program has of a tile is a part: fp32, through L2. Whoever is the last to bring one adds up all of them, in the
order of inputs, so that sums do not depend on who that was. Arrivals are counted; the last one sets the count back to
zero, for the next launch.

What this file does not know: when it is taken (`linear` does). What it does not do: fp32, rows that do not begin at 16
bytes, weights that do not fit into all shared memory together.
"""

from __future__ import annotations

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
"""Outputs and inputs of an item. 64: the least that a warpgroup multiplies. 256: on an H200 better than 128."""
BLOCKS = (16, 32)
"""Tokens, padded: columns of a product. Few, since each is a version of the kernel."""
MOST_ITEMS = 4
"""Of a program: with x for 32 tokens they are 192 KB of shared memory; a fifth would be too much."""
SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@functools.cache
def items_of_program(D: int, F: int, processors: int) -> int | None:
    """P: as few as make one program for a multiprocessor. None: even with most there are more programs."""
    for items in range(1, MOST_ITEMS + 1):
        if cdiv(F, TILE) * cdiv(cdiv(D, DEPTH), items) <= processors:
            return items
    return None


# Long parameter lists; one name per line would hide what they do.
# fmt: off


@gluon.jit
def multiply_items(w_desc, x_desc, tile, first, P: gl.constexpr):
    """P items of a tile times x: [TILE, TP]. Those beyond the last input are zeros: so the copy engine fills them."""
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
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    t = gl.arange(0, TP, gl.SliceLayout(1, layout))[:, None]
    r = gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    sum_TR = gl.zeros([TP, TILE], gl.float32, layout)
    for j in gl.static_range(PARTS):
        place = part + (tile * PARTS + j) * (TILE * TP) + (t * TILE + r)
        # Not through L1, which knows nothing of what others wrote.
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
    """P items of a tile from the program's on; PARTS programs share a tile."""
    TILE: gl.constexpr = w_desc.block_shape[0]
    TP: gl.constexpr = x_desc.block_shape[0]
    who = gl.program_id(0)
    tile = who // PARTS
    acc = multiply_items(w_desc, x_desc, tile, who % PARTS * P, P)
    r = gl.arange(0, TILE, gl.SliceLayout(1, acc.type.layout))[:, None]
    t = gl.arange(0, TP, gl.SliceLayout(0, acc.type.layout))[None, :]
    gl.store(part + who * (TILE * TP) + (t * TILE + r), acc, mask=t < num_tokens)
    barrier()  # one thread counts for all: what they wrote is to be there before
    arrived = gl.atomic_add(count + tile, 1, sem="acq_rel")
    if arrived == PARTS - 1:
        add_parts(part, bias_F, y_TF, tile, num_outputs, num_tokens, TILE, TP, PARTS)
        gl.store(count + tile, 0)


# fmt: on


@functools.cache
def counts(device: torch.device) -> torch.Tensor:
    """Arrivals at each tile: zeros between launches, which share them.

    So launches on a device have to follow each other. They do: a launch counts behind its wait, and of what a step runs
    side by side (a shared expert; router and experts) only one has products of this size. Two models that run at the
    same time on one device need a process each.
    """
    return lasting_zeros(device, num_processors(device))


def takes(x_TD: torch.Tensor, weight_FD: torch.Tensor) -> bool:
    """The copy engine wants rows that begin at 16 bytes."""
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
        bias_F,
        y_TF,
        torch.empty(tiles * parts, block, TILE, dtype=torch.float32, device=device),
        counts(device),
        F,
        tokens,
        P=items,
        PARTS=parts,
        num_warps=4,
        launch_pdl=True,
    )
    return y_TF
