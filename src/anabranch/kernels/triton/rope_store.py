"""Head norms, rope and the KV write in one kernel.

T tokens, H query heads, G key-value heads, D head dim, F rotated pairs (2F ≤ D), P pages, S slots in a page,
B rows of a program.

A row is a head of a token. A program's rows are all queries, all keys or all values: of one token where tokens are few
or a norm goes over all heads, else of as many as fill it. A head lies in two tiles of F columns, whose pairs meet in
the same lane, and a third for what is not rotated. What the reference rounds between norm and rope is rounded here too,
and so is what it rounds before it divides by the scale of an FP8 cache.

Norm weights are parameters: with dependent launch they are fetched before the wait. The next kernel may start after it,
so that attention reads what is older than the projection (lengths, page tables) before its own wait.
"""

import functools

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.launch import (
    FLOATS,
    FP8,
    cdiv,
    converts_fp8,
    launch_options,
    machine_of,
    next_power_of_2,
    wait_for_predecessor,
)
from anabranch.ops.rope_store import RopeStoreCall

MAX_TILE = 16384
"""Elements of a program, where a norm goes over all heads."""
FEW_TOKENS, FEW_ELEMENTS, MANY_ELEMENTS = 64, 512, 2048
"""Up to FEW_TOKENS a program has about FEW_ELEMENTS, so that there are more programs; with more, MANY_ELEMENTS."""


@triton.jit
def load_weight(weight, column_BC, is_there_BC, head_B, D: tl.constexpr, PER_HEAD: tl.constexpr):
    """fp32 [B, C], or [1, C] where all heads have the same."""
    if PER_HEAD:
        return tl.load(weight + column_BC, mask=column_BC < D, other=0.0).to(tl.float32)
    else:
        return tl.load(weight + head_B[:, None] * D + column_BC, mask=is_there_BC, other=0.0).to(tl.float32)


@triton.jit
def to_store(x, dtype: tl.constexpr, factor, stored: tl.constexpr):
    """fp32 as it is stored: in the model's dtype, or (with a factor, which is 1 / scale) in FP8, within its range."""
    x = x.to(dtype)
    if factor is not None:
        x = tl.clamp(x.to(tl.float32) * factor, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(stored)
    return x


@triton.jit
def do_heads(
    x, weight, cos, sin, out, factor, slot_T, num_tokens, x_stride, out_stride, slot_stride, t, part, first, eps,
    HEADS: tl.constexpr, D: tl.constexpr, F: tl.constexpr, NORM: tl.constexpr, S: tl.constexpr,
    B: tl.constexpr, ROWS: tl.constexpr, FP: tl.constexpr, RP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Heads first .. first + B of a token, or (ROWS < B) all heads of B // ROWS tokens. NORM: none, head or all.

    `x`, `cos`, `sin` and (without slots) `out` are token t's, which is the only one (`num_tokens` is None) or the first
    of a group, of which this program has the part of that number. `out_stride` is a page's where there are slots.
    """
    row_B = tl.arange(0, B)
    head_B = row_B % ROWS if ROWS < B else first + row_B
    is_head_B1 = (head_B < HEADS)[:, None]
    if num_tokens is not None:
        further = part * (B // ROWS)
        if ROWS < B:
            tl.static_assert(NORM != "all", "its sum goes over all rows")
            further += row_B // ROWS
        further = tl.minimum(further, num_tokens - t - 1)  # rows past the end repeat the last token's
        t += further
        if ROWS < B:
            further = further[:, None]
        x += further * x_stride
        cos += further * F
        sin += further * F
        if slot_T is None:
            out += further * out_stride
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
    wait_for_predecessor(DEPENDENT)

    kept = True
    if slot_T is not None:
        slot = tl.load(slot_T + t).to(tl.int64)
        if ROWS < B:
            slot = slot[:, None]  # only now: as a column it would be read once for each element of a lane
        kept = slot >= 0
        out += (slot // S) * out_stride + (slot % S) * slot_stride
    square_B = tl.zeros((B,), tl.float32)
    if F:
        a = tl.load(x + start_B1 + pair_1F, mask=is_pair_BF, other=0.0).to(tl.float32)
        b = tl.load(x + start_B1 + F + pair_1F, mask=is_pair_BF, other=0.0).to(tl.float32)
        cos = tl.load(cos + pair_1F, mask=pair_1F < F, other=0.0)
        sin = tl.load(sin + pair_1F, mask=pair_1F < F, other=0.0)
        square_B += tl.sum(a * a + b * b, 1)
    if RP:
        rest = tl.load(x + start_B1 + rest_1R, mask=is_rest_BR, other=0.0).to(tl.float32)
        square_B += tl.sum(rest * rest, 1)
    element: tl.constexpr = x.dtype.element_ty
    stored: tl.constexpr = out.dtype.element_ty
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
        first_half, second_half = a * cos - b * sin, b * cos + a * sin
        tl.store(out + start_B1 + pair_1F, to_store(first_half, element, factor, stored), mask=is_pair_BF & kept)
        tl.store(out + start_B1 + F + pair_1F, to_store(second_half, element, factor, stored), mask=is_pair_BF & kept)
    if RP:
        tl.store(out + start_B1 + rest_1R, to_store(rest, element, factor, stored), mask=is_rest_BR & kept)


@triton.jit(do_not_specialize=["num_tokens", "eps"])
def rope_store_kernel(
    q_THD, k_TGD, v_TGD, cos_TF, sin_TF, q_weight, k_weight, rotated_THD, k_PSGD, v_PSGD, slot_T, num_tokens,
    q_stride, k_stride, v_stride, page_stride, slot_stride, eps, k_factor, v_factor,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, F: tl.constexpr, S: tl.constexpr,
    NORM: tl.constexpr, V_NORM: tl.constexpr, B: tl.constexpr, Q_ROWS: tl.constexpr, KV_ROWS: tl.constexpr,
    FP: tl.constexpr, RP: tl.constexpr, DP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Q_ROWS and KV_ROWS: of a token in a program. A group has as many tokens as a program of the fewer rows takes."""
    FEWER: tl.constexpr = min(Q_ROWS, KV_ROWS)
    Q_PARTS: tl.constexpr = Q_ROWS // FEWER
    KV_PARTS: tl.constexpr = KV_ROWS // FEWER
    Q_PROGRAMS: tl.constexpr = (H + B - 1) // B * Q_PARTS
    KV_PROGRAMS: tl.constexpr = (G + B - 1) // B * KV_PARTS
    t, program = tl.program_id(0).to(tl.int64) * (B // FEWER), tl.program_id(1)
    cos, sin = cos_TF + t * F, sin_TF + t * F
    if program < Q_PROGRAMS:
        do_heads(
            q_THD + t * q_stride, q_weight, cos, sin, rotated_THD + t * (H * D), None, None,
            num_tokens, q_stride, H * D, 0, t, program % Q_PARTS, program // Q_PARTS * B, eps,
            H, D, F, NORM, S, B, Q_ROWS, FP, RP, DEPENDENT,
        )  # fmt: skip
    elif program < Q_PROGRAMS + KV_PROGRAMS:
        program -= Q_PROGRAMS
        do_heads(
            k_TGD + t * k_stride, k_weight, cos, sin, k_PSGD, k_factor, slot_T,
            num_tokens, k_stride, page_stride, slot_stride, t, program % KV_PARTS, program // KV_PARTS * B, eps,
            G, D, F, NORM, S, B, KV_ROWS, FP, RP, DEPENDENT,
        )  # fmt: skip
    else:
        program -= Q_PROGRAMS + KV_PROGRAMS
        do_heads(
            v_TGD + t * v_stride, None, cos, sin, v_PSGD, v_factor, slot_T,
            num_tokens, v_stride, page_stride, slot_stride, t, program % KV_PARTS, program // KV_PARTS * B, eps,
            G, D, 0, V_NORM, S, B, KV_ROWS, FP, DP, DEPENDENT,
        )  # fmt: skip


def accepts(call: RopeStoreCall) -> bool:
    q_THD, k_PSGD, v_PSGD = call.q_THD, call.k_PSGD, call.v_PSGD
    H, D = q_THD.shape[1:]
    return (
        q_THD.dtype in FLOATS
        and k_PSGD.dtype == v_PSGD.dtype
        and (k_PSGD.dtype == q_THD.dtype or (k_PSGD.dtype == FP8 and converts_fp8(q_THD.device)))
        and call.k_TGD.dtype == call.v_TGD.dtype == q_THD.dtype
        and all(x.stride(2) == 1 and x.stride(1) == D for x in (q_THD, call.k_TGD, call.v_TGD, k_PSGD[0]))
        and k_PSGD.stride() == v_PSGD.stride()
        and all(x.dtype == torch.float32 and x.is_contiguous() for x in (call.cos_TF, call.sin_TF))
        and (call.q_weight is None) == (call.k_weight is None)
        and all(x is None or x.is_contiguous() for x in (call.q_weight, call.k_weight))
        and next_power_of_2(H) * next_power_of_2(D) <= MAX_TILE
    )


@ops.rope_store.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def rope_store(call: RopeStoreCall) -> torch.Tensor:
    q_THD, k_TGD, v_TGD, cos_TF, sin_TF, q_weight, k_weight, v_norm, eps, k_PSGD, v_PSGD, slot_T, *scales = call
    (tokens, H, D), G = q_THD.shape, k_TGD.shape[1]
    rotated_THD = torch.empty(tokens, H, D, dtype=q_THD.dtype, device=q_THD.device)
    if tokens == 0:
        return rotated_THD
    norm = "none" if q_weight is None else "head" if q_weight.numel() == D else "all"
    factors = [1 / scale for scale in scales] if k_PSGD.dtype == FP8 else (None, None)
    many = tokens > FEW_TOKENS or machine_of(q_THD.device).fixed
    elements = MANY_ELEMENTS if many else FEW_ELEMENTS
    group, programs, constants = choose_constants(elements, many, H, G, D, cos_TF.shape[1], norm)
    rope_store_kernel[(cdiv(tokens, group), programs)](
        q_THD, k_TGD, v_TGD, cos_TF, sin_TF, q_weight, k_weight, rotated_THD, k_PSGD, v_PSGD, slot_T,
        None if group == 1 else tokens, q_THD.stride(0), k_TGD.stride(0), v_TGD.stride(0), k_PSGD.stride(0),
        k_PSGD.stride(1), eps, *factors,
        H=H, G=G, D=D, F=cos_TF.shape[1], S=k_PSGD.shape[1], NORM=norm, V_NORM="head" if v_norm else "none",
        **constants, **launch_options(q_THD.device),
    )  # fmt: skip
    return rotated_THD


@functools.cache
def choose_constants(
    elements: int, many: bool, H: int, G: int, D: int, F: int, norm: str
) -> tuple[int, int, dict[str, int]]:
    """(tokens of a group, its programs, constants).

    About `elements` a program and 512 a warp; but a norm over all heads needs them in one program. With few
    tokens a program has no more rows than one of them can fill: more programs are soonest done.
    """
    DP, heads, kv_heads = next_power_of_2(D), next_power_of_2(H), next_power_of_2(G)
    B, most = max(1, elements // DP), max(heads, kv_heads)
    if many and norm != "all":
        q_rows, kv_rows = min(B, heads), min(B, kv_heads)
    else:
        B = q_rows = kv_rows = most if norm == "all" else min(B, most)
    fewer = min(q_rows, kv_rows)
    programs = cdiv(H, B) * (q_rows // fewer) + 2 * cdiv(G, B) * (kv_rows // fewer)
    rest = D - 2 * F
    constants = {
        "B": B,
        "Q_ROWS": q_rows,
        "KV_ROWS": kv_rows,
        "FP": next_power_of_2(F),
        "RP": next_power_of_2(rest) if rest else 0,
        "DP": DP,
        "num_warps": min(max(B * DP // 512, 1), 8),
    }
    return B // fewer, programs, constants
