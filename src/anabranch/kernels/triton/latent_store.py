"""The norm of latent rows, rope and the write in one kernel.

T tokens, H query heads, D = N + 2F head dim of queries, L latent dims, F pairs that turn, P pages, S slots in a page,
B heads of a program. NP, LP and FP are N, L and F rounded up.

The first program of a token has its row, the others B heads of its queries each.
"""

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.launch import FLOATS, cdiv, launch_options, next_power_of_2, wait_for_predecessor
from anabranch.ops.latent_store import LatentStoreCall

ELEMENTS = 2048
"""Of the queries of a program, about."""
MAX_LATENT = 8192


@triton.jit
def turn(source, target, cos, sin, mask, INTERLEAVED: tl.constexpr, F: tl.constexpr, FP: tl.constexpr):
    """Pairs of columns from `source` on, turned, to `target`. Both point to the first column of each row."""
    pair = tl.arange(0, FP)[None, :]
    mask = mask & (pair < F)
    first, second = pair, F + pair
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    a = tl.load(source + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + second, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(cos + pair, mask=pair < F, other=0.0)
    sin = tl.load(sin + pair, mask=pair < F, other=0.0)
    tl.store(target + first, (a * cos - b * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(target + second, (b * cos + a * sin).to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["eps"])
def latent_store_kernel(
    q_THD, row_TC, weight_L, cos_TF, sin_TF, turned_THD, rows_PSC, slot_T, q_stride, row_stride, page_stride, eps,
    H: tl.constexpr, N: tl.constexpr, L: tl.constexpr, F: tl.constexpr, S: tl.constexpr, B: tl.constexpr,
    NP: tl.constexpr, LP: tl.constexpr, FP: tl.constexpr, INTERLEAVED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    t, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos_TF + t * F, sin_TF + t * F
    if program == 0:
        latent = tl.arange(0, LP)
        weight = tl.load(weight_L + latent, mask=latent < L, other=0.0).to(tl.float32)
        wait_for_predecessor(DEPENDENT)
        slot = tl.load(slot_T + t).to(tl.int64)
        if slot >= 0:
            source = row_TC + t * row_stride
            target = rows_PSC + (slot // S) * page_stride + (slot % S) * (L + 2 * F)
            x = tl.load(source + latent, mask=latent < L, other=0.0).to(tl.float32)
            x = x * tl.rsqrt(tl.sum(x * x, 0) * (1.0 / L) + eps) * weight
            tl.store(target + latent, x.to(rows_PSC.dtype.element_ty), mask=latent < L)
            one = tl.zeros((1, 1), tl.int64)
            turn(source + L + one, target + L + one, cos, sin, one == 0, INTERLEAVED, F, FP)
    else:
        wait_for_predecessor(DEPENDENT)
        head = (program - 1) * B + tl.arange(0, B)
        is_head = (head < H)[:, None]
        column = tl.arange(0, NP)[None, :]
        within = head[:, None] * (N + 2 * F)
        source, target = q_THD + t * q_stride + within, turned_THD + t * (H * (N + 2 * F)) + within
        mask = is_head & (column < N)
        tl.store(target + column, tl.load(source + column, mask=mask, other=0.0), mask=mask)
        turn(source + N, target + N, cos, sin, is_head, INTERLEAVED, F, FP)


def accepts(call: LatentStoreCall) -> bool:
    q_THD, row_TC, rows_PSC = call.q_THD, call.row_TC, call.rows_PSC
    return (
        q_THD.dtype in FLOATS
        and q_THD.dtype == row_TC.dtype == rows_PSC.dtype
        and q_THD.stride(2) == row_TC.stride(1) == 1
        and q_THD.stride(1) == q_THD.shape[2]
        and rows_PSC[0].is_contiguous()
        and call.weight_L.is_contiguous()
        and all(x.dtype == torch.float32 and x.is_contiguous() for x in (call.cos_TF, call.sin_TF))
        and call.weight_L.shape[0] <= MAX_LATENT
    )


@ops.latent_store.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def latent_store(call: LatentStoreCall) -> torch.Tensor:
    q_THD, row_TC, weight_L, eps, cos_TF, sin_TF, interleaved, rows_PSC, slot_T = call
    (tokens, H, D), F, L = q_THD.shape, cos_TF.shape[1], weight_L.shape[0]
    turned_THD = torch.empty(tokens, H, D, dtype=q_THD.dtype, device=q_THD.device)
    if tokens == 0:
        return turned_THD
    B = min(max(1, ELEMENTS // next_power_of_2(D)), next_power_of_2(H))
    latent_store_kernel[(tokens, 1 + cdiv(H, B))](
        q_THD, row_TC, weight_L, cos_TF, sin_TF, turned_THD, rows_PSC, slot_T, q_THD.stride(0), row_TC.stride(0),
        rows_PSC.stride(0), eps,
        H=H, N=D - 2 * F, L=L, F=F, S=rows_PSC.shape[1], B=B, NP=next_power_of_2(D - 2 * F), LP=next_power_of_2(L),
        FP=next_power_of_2(F), INTERLEAVED=interleaved, num_warps=4, **launch_options(q_THD.device),
    )  # fmt: skip
    return turned_THD
