"""Head norms and rotary positions for queries and keys, in one op because one kernel should do both.

T tokens, H query heads, G key heads, D head dim, F rotated pairs (2F ≤ D).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.norm import rms_norm
from anabranch.ops.op import Sample, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for label, tokens, heads, kv_heads, dim, pairs, norm in (
        ("full, no norm", 5, 4, 2, 16, 8, None),
        ("full, head norm", 3, 4, 1, 32, 16, "head"),
        ("partial, head norm", 2, 2, 2, 16, 4, "head"),
        ("full, norm over all heads", 4, 4, 2, 8, 4, "all"),
        ("no tokens", 0, 2, 1, 8, 4, "head"),
    ):
        angle = 100 * torch.rand(tokens, pairs, generator=generator)
        angle[:, pairs // 2 :] *= 0 if label.startswith("full, no") else 1  # proportional rope has zero frequencies
        # Strided, as slices of a packed projection are.
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        width = {None: None, "head": (dim, dim), "all": (heads * dim, kv_heads * dim)}[norm]
        yield (
            label,
            {
                "q_THD": qkv[:, :heads],
                "k_TGD": qkv[:, heads : heads + kv_heads],
                "cos_TF": angle.cos(),
                "sin_TF": angle.sin(),
                "q_weight": None if width is None else torch.rand(width[0], generator=generator).to(dtype),
                "k_weight": None if width is None else torch.rand(width[1], generator=generator).to(dtype),
                "eps": 1e-6,
            },
        )


@op(samples=samples)
def qk_norm_rope(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise (per head, or over all heads when the weight is that wide), then rotate pairs (i, i + F).

    Only the first 2F of D dimensions are rotated (partial rope). Proportional rope is F = D / 2 with zero angles
    at the end. cos and sin are fp32. Writes over neither input.
    """
    return (
        _rotate(_head_norm(q_THD, q_weight, eps), cos_TF, sin_TF),
        _rotate(_head_norm(k_TGD, k_weight, eps), cos_TF, sin_TF),
    )


def _head_norm(x_THD: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x_THD
    if weight.numel() == x_THD.shape[-1]:
        return rms_norm.reference(x_THD, weight, eps)
    return rms_norm.reference(x_THD.flatten(-2), weight, eps).view_as(x_THD)


def _rotate(x_THD: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor) -> torch.Tensor:
    pairs = cos_TF.shape[-1]
    cos, sin = cos_TF[:, None], sin_TF[:, None]
    a, b, rest = x_THD.float().split([pairs, pairs, x_THD.shape[-1] - 2 * pairs], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x_THD.dtype)
