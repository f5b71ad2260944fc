"""Head norms, rope and the KV write in one kernel.

T tokens, H query heads, G key-value heads, D head dim, F rotated pairs (2F ≤ D), P pages, S slots in a page,
B heads of a program.

A program has one token and B heads, all of them queries, all keys or all values. A head lies in two tiles of F
columns, whose pairs meet in the same lane, and a third for what is not rotated. What the reference rounds between norm
and rope is rounded here too.

Norm weights are parameters: with dependent launch they are fetched before the wait. The successor is let in after it,
so that attention may read what is older than the projection (lengths, page tables) before its own.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch import ops
from anabranch.kernels.triton.launch import cdiv, dependent_launch, next_power_of_2

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MAX_TILE = 16384
"""Elements of a program, where a norm goes over all heads."""
FEW_TOKENS, FEW_ELEMENTS, MANY_ELEMENTS = 64, 512, 2048
"""Up to so many tokens a program has about so many elements, so that there are more programs; else so many."""


@triton.jit
def load_weight(weight, column_BC, is_there_BC, head_B, D: tl.constexpr, PER_HEAD: tl.constexpr):
    """fp32 [B, C], or [1, C] where all heads have the same."""
    if PER_HEAD:
        return tl.load(weight + column_BC, mask=column_BC < D, other=0.0).to(tl.float32)
    else:
        return tl.load(weight + head_B[:, None] * D + column_BC, mask=is_there_BC, other=0.0).to(tl.float32)


@triton.jit
def do_heads(
    x, weight, cos, sin, out, slot_T, page_stride, slot_stride, t, first, eps,
    HEADS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, S: tl.constexpr,
    B: tl.constexpr, FP: tl.constexpr, RP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Heads first .. first + B of a token, `x` and (without slots) `out` being its own. NORM: none, head or all."""
    head_B = first + tl.arange(0, B)
    is_head_B1 = (head_B < HEADS)[:, None]
    start_B1 = head_B[:, None] * D
    PER_HEAD: tl.constexpr = NORM == "head"
    if F:
        pair_1F = tl.arange(0, FP)[None, :]
        is_pair_BF = is_head_B1 & (pair_1F < F)
        if weight is not None:
            weight_a = load_weight(weight, pair_1F, is_pair_BF, head_B, D, PER_HEAD)
            weight_b = load_weight(weight, F + pair_1F, is_pair_BF, head_B, D, PER_HEAD)
    if RP:
        rest_1R = 2 * F + tl.arange(0, RP)[None, :]
        is_rest_BR = is_head_B1 & (rest_1R < D)
        if weight is not None:
            weight_rest = load_weight(weight, rest_1R, is_rest_BR, head_B, D, PER_HEAD)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()

    kept = True
    if slot_T is not None:
        slot = tl.load(slot_T + t).to(tl.int64)
        kept = slot >= 0
        out += (slot // S) * page_stride + (slot % S) * slot_stride
    square_B = tl.zeros((B,), tl.float32)
    if F:
        a = tl.load(x + start_B1 + pair_1F, mask=is_pair_BF, other=0.0).to(tl.float32)
        b = tl.load(x + start_B1 + F + pair_1F, mask=is_pair_BF, other=0.0).to(tl.float32)
        cos_1F = tl.load(cos + pair_1F, mask=pair_1F < F, other=0.0)
        sin_1F = tl.load(sin + pair_1F, mask=pair_1F < F, other=0.0)
        square_B += tl.sum(a * a + b * b, 1)
    if RP:
        rest = tl.load(x + start_B1 + rest_1R, mask=is_rest_BR, other=0.0).to(tl.float32)
        square_B += tl.sum(rest * rest, 1)
    element = out.dtype.element_ty
    if NORM != "none":
        if PER_HEAD:
            scale = tl.rsqrt(square_B * (1.0 / D) + eps)[:, None]
        else:
            scale = tl.rsqrt(tl.sum(square_B, 0) * (1.0 / (HEADS * D)) + eps)
        if F:
            a, b = a * scale, b * scale
            if weight is not None:
                a, b = a * weight_a, b * weight_b
            a, b = a.to(element).to(tl.float32), b.to(element).to(tl.float32)
        if RP:
            rest = rest * scale
            if weight is not None:
                rest = rest * weight_rest
    if F:
        first_half, second_half = a * cos_1F - b * sin_1F, b * cos_1F + a * sin_1F
        tl.store(out + start_B1 + pair_1F, first_half.to(element), mask=is_pair_BF & kept)
        tl.store(out + start_B1 + F + pair_1F, second_half.to(element), mask=is_pair_BF & kept)
    if RP:
        tl.store(out + start_B1 + rest_1R, rest.to(element), mask=is_rest_BR & kept)


@triton.jit(do_not_specialize=["eps"])
def rope_store_kernel(
    q_THD, k_TGD, v_TGD, cos_TF, sin_TF, q_weight, k_weight, rotated_THD, k_PSGD, v_PSGD, slot_T,
    q_stride, k_stride, v_stride, page_stride, slot_stride, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, F: tl.constexpr, S: tl.constexpr,
    NORM: tl.constexpr, V_NORM: tl.constexpr,
    B: tl.constexpr, FP: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    Q_BLOCKS: tl.constexpr = (H + B - 1) // B
    KV_BLOCKS: tl.constexpr = (G + B - 1) // B
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cos, sin = cos_TF + t * F, sin_TF + t * F
    if block < Q_BLOCKS:
        do_heads(
            q_THD + t * q_stride, q_weight, cos, sin, rotated_THD + t * (H * D), None, 0, 0, t, block * B, eps,
            H, D, F, NORM, S, B, FP, RP, DEPENDENT,
        )  # fmt: skip
    elif block < Q_BLOCKS + KV_BLOCKS:
        do_heads(
            k_TGD + t * k_stride, k_weight, cos, sin, k_PSGD, slot_T, page_stride, slot_stride, t,
            (block - Q_BLOCKS) * B, eps, G, D, F, NORM, S, B, FP, RP, DEPENDENT,
        )  # fmt: skip
    else:
        do_heads(
            v_TGD + t * v_stride, None, cos, sin, v_PSGD, slot_T, page_stride, slot_stride, t,
            (block - Q_BLOCKS - KV_BLOCKS) * B, eps, G, D, 0, V_NORM, S, B, FP, DP, DEPENDENT,
        )  # fmt: skip


def accepts(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    v_norm: bool,
    eps: float,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    slot_T: torch.Tensor,
) -> bool:
    H, D = q_THD.shape[1:]
    weights = (q_weight, k_weight)
    return (
        q_THD.dtype in FLOATS
        and all(x.dtype == q_THD.dtype for x in (k_TGD, v_TGD, k_PSGD, v_PSGD))
        and all(x.stride(2) == 1 and x.stride(1) == D for x in (q_THD, k_TGD, v_TGD, k_PSGD[0]))
        and k_PSGD.stride() == v_PSGD.stride()
        and all(x.dtype == torch.float32 and x.is_contiguous() for x in (cos_TF, sin_TF))
        and (q_weight is None) == (k_weight is None)
        and all(x is None or x.is_contiguous() for x in weights)
        and next_power_of_2(H) * next_power_of_2(D) <= MAX_TILE
    )


@ops.rope_store.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def rope_store(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    v_norm: bool,
    eps: float,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    slot_T: torch.Tensor,
) -> torch.Tensor:
    (tokens, H, D), G = q_THD.shape, k_TGD.shape[1]
    rotated_THD = torch.empty(tokens, H, D, dtype=q_THD.dtype, device=q_THD.device)
    if tokens == 0:
        return rotated_THD
    norm = "none" if q_weight is None else "head" if q_weight.numel() == D else "all"
    elements = FEW_ELEMENTS if tokens <= FEW_TOKENS else MANY_ELEMENTS
    constants = choose_constants(elements, H, G, D, cos_TF.shape[1], norm)
    blocks = cdiv(H, constants["B"]) + 2 * cdiv(G, constants["B"])
    dependent = dependent_launch(q_THD.device)
    rope_store_kernel[(tokens, blocks)](
        q_THD,
        k_TGD,
        v_TGD,
        cos_TF,
        sin_TF,
        q_weight,
        k_weight,
        rotated_THD,
        k_PSGD,
        v_PSGD,
        slot_T,
        q_THD.stride(0),
        k_TGD.stride(0),
        v_TGD.stride(0),
        k_PSGD.stride(0),
        k_PSGD.stride(1),
        eps,
        S=k_PSGD.shape[1],
        NORM=norm,
        V_NORM="head" if v_norm else "none",
        DEPENDENT=dependent,
        **constants,
        **({"launch_pdl": True} if dependent else {}),
    )
    return rotated_THD


@functools.cache
def choose_constants(elements: int, H: int, G: int, D: int, F: int, norm: str) -> dict[str, int]:
    """About so many elements a program and 512 a warp; but a norm over all heads needs them in one program."""
    DP = next_power_of_2(D)
    most = next_power_of_2(max(H, G))
    B = most if norm == "all" else min(most, max(1, elements // DP))
    rest = D - 2 * F
    return {
        "H": H,
        "G": G,
        "D": D,
        "F": F,
        "B": B,
        "FP": next_power_of_2(F),
        "RP": next_power_of_2(rest) if rest else 0,
        "DP": DP,
        "num_warps": min(max(B * DP // 512, 1), 8),
    }
