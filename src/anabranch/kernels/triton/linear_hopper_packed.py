"""Dense projections with INT4 weights on Hopper, from a few tokens on: activations in two parts, as in
experts_hopper_split. T tokens, D inputs, F outputs.

A program has 64 outputs, R tokens and STAGES times 128 inputs; all its weights are loaded before the wait for
the previous kernel. PARTS programs share the inputs of an output; as in linear_hopper, the last one adds up what all
have computed.

Not supported: more than 64 tokens, or with zero points 32; groups of other than 128 inputs; more than 16,384 inputs.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch.formats import Grouped
from anabranch.kernels.compiling.gluon_names import barrier, tma_load
from anabranch.kernels.triton.experts_hopper_split import (
    add_scaled,
    byte_descriptor,
    load_bytes,
    load_small_point,
    product,
    split_descriptor,
    split_operand,
)
from anabranch.kernels.triton.launch import cdiv, lasting_zeros
from anabranch.kernels.triton.linear_hopper import add_parts
from anabranch.kernels.triton.split_rows import split_rows
from anabranch.ops.weight import Weight

MOST_TILES = 1 << 12
LEAST_OUTPUTS = 1024
"""As in linear_hopper, launches share counts: a router, which may run beside a shared expert, is not to use them."""


# fmt: off


@gluon.jit(do_not_specialize=["num_tokens"])
def multiply_packed(
    w_desc, x_desc, scale, zero, x_scale, x_sum, bias_F, y_TF, part, count, num_outputs, num_tokens,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
):
    N: gl.constexpr = 64
    R: gl.constexpr = x_desc.block_shape[1]
    G: gl.constexpr = DEPTH // 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    tile = gl.program_id(0) // PARTS
    first = gl.program_id(0) % PARTS * STAGES
    token = gl.program_id(1) * R
    w = gl.allocate_shared_memory(gl.uint8, [STAGES, N, 64], w_desc.layout)
    x = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 1, R, 128], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(full.index(n), count=1)
    for n in gl.static_range(STAGES):
        mbarrier.expect(full.index(n), N * 64 + R * 256)
        tma_load(w_desc, [tile * N, (first + n) * 64], full.index(n), w.index(n))
    row = gl.minimum(tile * N + gl.arange(0, N, gl.SliceLayout(1, layout)), num_outputs - 1) * G
    r = gl.arange(0, R, gl.SliceLayout(0, layout))
    s = ()
    z = ()
    for n in gl.static_range(STAGES):
        # Beyond the last input weights are zeros, and so must the scale be: of a zero point it would be a product.
        inside = first + n < G
        s = s + (gl.load(scale + row + first + n, mask=inside, other=0.0).to(gl.float32),)
        z = z + (load_small_point(zero, row + gl.minimum(first + n, G - 1)),)
    gdc_wait()
    gdc_launch_dependents()
    for n in gl.static_range(STAGES):
        tma_load(x_desc, [first + n, token, 0], full.index(n), x.index(2 * n))
        tma_load(x_desc, [G + first + n, token, 0], full.index(n), x.index(2 * n + 1))
    at = gl.minimum(token + r, num_tokens - 1)
    factor = gl.load(x_scale + at) * 512.0  # see unpack_int4
    acc = gl.zeros([N, R], gl.float32, layout)
    a = gl.zeros([N, R], gl.float32, layout)
    b = gl.zeros([N, R], gl.float32, layout)
    t = gl.load(x_sum + at * G + gl.minimum(first, G - 1))
    for n in gl.static_range(STAGES):
        mbarrier.wait(full.index(n), 0)
        low, high = load_bytes(w.index(n), "int4")
        if n % 2 == 0:
            a = product(split_operand(low, high, R), x, n, a, 0)
        else:
            b = product(split_operand(low, high, R), x, n, b, 0)
        if n > 0:
            if n % 2 == 0:
                b = warpgroup_mma_wait(2, deps=[b])
                acc = add_scaled(acc, b, s[n - 1], z[n - 1], t)
            else:
                a = warpgroup_mma_wait(2, deps=[a])
                acc = add_scaled(acc, a, s[n - 1], z[n - 1], t)
            t = gl.load(x_sum + at * G + gl.minimum(first + n, G - 1))
    gl.static_assert(STAGES % 2 == 0)
    acc = add_scaled(acc, warpgroup_mma_wait(0, deps=[b]), s[STAGES - 1], z[STAGES - 1], t) * factor[None, :]
    output = gl.arange(0, N, gl.SliceLayout(1, layout))[:, None]
    if PARTS == 1:
        place = tile * N + output
        if bias_F is not None:
            acc += gl.load(bias_F + gl.minimum(place, num_outputs - 1)).to(gl.float32)
        mask = (place < num_outputs) & (token + r < num_tokens)[None, :]
        gl.store(y_TF + ((token + r)[None, :] * num_outputs + place), acc.to(y_TF.dtype.element_ty), mask=mask)
    else:
        tiles = gl.num_programs(0) // PARTS
        part += gl.program_id(1) * (tiles * PARTS * N * R)
        place = part + gl.program_id(0) * (N * R) + (r[None, :] * N + output)
        gl.store(place, acc, mask=(token + r < num_tokens)[None, :])
        barrier()  # one thread counts for all, after all have stored
        counted = count + gl.program_id(1) * tiles + tile
        if gl.atomic_add(counted, 1, sem="acq_rel") == PARTS - 1:
            add_parts(part, bias_F, y_TF + token * num_outputs, tile, num_outputs, num_tokens - token, N, R, PARTS)
            gl.store(counted, 0)


# fmt: on


@functools.cache
def counts(device: torch.device) -> torch.Tensor:
    return lasting_zeros(device, MOST_TILES)  # as in linear_hopper


def takes(x_TD: torch.Tensor, weight_FD: Weight) -> bool:
    """Whether `run` supports these tensors, with the tile that `choose` chooses."""
    (tokens, D), (F, _), format = x_TD.shape, weight_FD.shape, weight_FD.format
    if not isinstance(format, Grouped) or (format.numbers, format.rows, format.group) != ("int4", 1, 128):
        return False
    few, known = 0 < tokens <= (32 if format.zero else 64), format.scale != "uint8" and x_TD.dtype == torch.bfloat16
    sizes = D % 128 == 0 and D <= 1 << 14 and LEAST_OUTPUTS <= F <= 64 * MOST_TILES
    return few and known and sizes and x_TD.stride(1) == 1 and weight_FD.tensors["data"].data_ptr() % 16 == 0


def choose(tokens: int) -> tuple[int, int]:
    """Tokens and stages of a program, as benchmarks/linear_tiles.py found them at 16 and 64 tokens."""
    return (16, 8) if tokens <= 16 else (32 if tokens <= 32 else 64, 4)


def run(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None, y_TF: torch.Tensor, tile: tuple[int, int]
) -> torch.Tensor:
    (tokens, D), F, device, (R, stages) = x_TD.shape, weight_FD.shape[0], x_TD.device, tile
    q_T2D, x_scale, x_sum = split_rows(x_TD)
    columns, rows, parts = cdiv(F, 64), cdiv(tokens, R), cdiv(D // 128, stages)
    assert parts == 1 or columns * rows <= MOST_TILES
    size = columns * parts * rows * 64 * R if parts > 1 else 1
    tensors = weight_FD.tensors
    multiply_packed[(columns * parts, rows)](
        byte_descriptor(tensors["data"], 64), split_descriptor(q_T2D, R, 1),
        tensors["scale"], tensors.get("zero"), x_scale, x_sum, bias_F, y_TF,
        torch.empty(size, dtype=torch.float32, device=device), counts(device), F, tokens,
        DEPTH=D, STAGES=stages, PARTS=parts, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return y_TF
