"""What comes between the packed projection and attention: head norms, rope and the KV write, in one op.

T tokens, H query heads, G key-value heads, D head dim, F rotated pairs (2F ≤ D), P pages, S slots in a page.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from anabranch.ops.norm import rms_norm
from anabranch.ops.op import Samples, op


class RopeStoreCall(NamedTuple):
    q_THD: torch.Tensor
    k_TGD: torch.Tensor
    v_TGD: torch.Tensor
    """May be the same tensor as k."""
    cos_TF: torch.Tensor
    sin_TF: torch.Tensor
    """fp32. Only the first 2F of D dimensions are rotated (partial rope). Proportional rope is F = D / 2 with zero
    angles at the end."""
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    """Of the norm of each head, or of all heads together where they are that wide; None: no norm."""
    v_norm: bool
    """Each value head is normalised, without a weight."""
    eps: float
    k_PSGD: torch.Tensor
    v_PSGD: torch.Tensor
    slot_T: torch.Tensor
    """Token t goes to slot_T[t] = page · S + offset; −1 (a padding row) is not written."""
    k_scale: float = 1.0
    v_scale: float = 1.0
    """Of pages in FP8, which hold keys and values divided by these; other pages hold them as they are."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for label, tokens, heads, kv_heads, dim, pairs, norm, v_norm in (
        ("no norm", 5, 4, 2, 16, 8, None, False),
        ("head norm", 3, 8, 2, 32, 16, "head", False),
        ("head norm, normed values", 3, 4, 4, 64, 32, "head", True),
        ("head norm, values are keys", 4, 4, 1, 32, 16, "head", True),
        ("head norm, pages in one piece", 5, 4, 2, 16, 8, "head", False),
        ("partial rope, odd width", 2, 3, 1, 24, 4, "head", False),
        ("norm over all heads", 4, 6, 2, 8, 4, "all", False),
        ("no padding, pages in one piece", 1, 4, 1, 32, 16, "head", False),
        ("no tokens", 0, 2, 1, 8, 4, "head", False),
        ("FP8 cache", 5, 4, 2, 32, 16, "head", True),
        ("FP8 cache, pages in one piece", 6, 3, 1, 24, 4, None, False),
    ):
        angle = 100 * torch.rand(tokens, pairs, generator=generator)
        angle[:, pairs // 2 :] *= 0 if label == "no norm" else 1  # proportional rope has zero frequencies
        # Strided, as slices of a packed projection are.
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        width = {None: None, "head": (dim, dim), "all": (heads * dim, kv_heads * dim)}[norm]
        slot = torch.randperm(4 * 4, generator=generator)[:tokens]
        slot[1::3] = -1
        # Keys and values next to each other in each page, as slices of one tensor, or each in one piece.
        pages = torch.randn(4, 2, 4, kv_heads, dim, generator=generator).to(dtype)
        if fp8 := label.startswith("FP8"):
            pages = pages.to(torch.float8_e4m3fn)
        k_PSGD, v_PSGD = pages.unbind(1) if not label.endswith("one piece") else pages.transpose(0, 1).contiguous()
        k_TGD, v_TGD = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        call = RopeStoreCall(
            q_THD=qkv[:, :heads],
            k_TGD=k_TGD,
            v_TGD=k_TGD if label.endswith("values are keys") else v_TGD,
            cos_TF=angle.cos(),
            sin_TF=angle.sin(),
            q_weight=None if width is None else torch.rand(width[0], generator=generator).to(dtype),
            k_weight=None if width is None else torch.rand(width[1], generator=generator).to(dtype),
            v_norm=v_norm,
            eps=1e-6,
            k_PSGD=k_PSGD,
            v_PSGD=v_PSGD,
            slot_T=slot.int() if label == "head norm" else slot,
            k_scale=0.004 if fp8 else 1.0,  # some keys are out of range
            v_scale=0.3 if fp8 else 1.0,
        )
        yield label, {"call": call}


@op(samples=samples, mutates=("k_PSGD", "v_PSGD"))
def rope_store(call: RopeStoreCall) -> torch.Tensor:
    """Queries, normed and rotated; keys (the same way) and values are written to their slots. Writes over none of q, k
    and v."""
    rope = call.cos_TF, call.sin_TF
    q_THD = rotate(head_norm(call.q_THD, call.q_weight, call.eps), *rope)
    k_TGD = rotate(head_norm(call.k_TGD, call.k_weight, call.eps), *rope)
    v_TGD = rms_norm.reference(call.v_TGD, None, call.eps) if call.v_norm else call.v_TGD
    write(k_TGD, v_TGD, call)
    return q_THD


def head_norm(
    x_THD: torch.Tensor, weight: torch.Tensor | None, eps: float, norm: Callable[..., torch.Tensor] = rms_norm.reference
) -> torch.Tensor:
    """Of each head, or over all heads when the weight is that wide."""
    if weight is None:
        return x_THD
    if weight.numel() == x_THD.shape[-1]:
        return norm(x_THD, weight, eps)
    return norm(x_THD.flatten(-2), weight, eps).view_as(x_THD)


def rotate(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + F) by their angles."""
    pairs = cos_TF.shape[-1]
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    a, b, rest = x_THD.float().split([pairs, pairs, x_THD.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x_THD.dtype)


def write(k_TGD: torch.Tensor, v_TGD: torch.Tensor, call: RopeStoreCall) -> None:
    """Keys and values into the call's pages."""
    kept = call.slot_T >= 0
    slot = call.slot_T[kept].long()
    page, offset = slot // call.k_PSGD.shape[1], slot % call.k_PSGD.shape[1]
    for pages, x_TGD, scale in ((call.k_PSGD, k_TGD, call.k_scale), (call.v_PSGD, v_TGD, call.v_scale)):
        as_bytes(pages)[page, offset] = as_bytes(to_cache(x_TGD[kept], scale, pages.dtype))


def to_cache(x_TGD: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as pages of this dtype hold them. FP8 has no infinity: what is out of range becomes ±448."""
    if dtype != torch.float8_e4m3fn:
        return x_TGD
    return (x_TGD.float() * (1 / scale)).clamp(-448, 448).to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, for torch's indexing; other tensors as they are."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
