"""What stands between the packed projection and attention: head norms, rope and the KV write, in one op.

T tokens, H query heads, G key-value heads, D head dim, F rotated pairs (2F ≤ D), P pages, S slots in a page.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.kv_store import kv_store
from anabranch.ops.norm import rms_norm
from anabranch.ops.op import Sample, op
from anabranch.ops.rope import qk_norm_rope


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for label, tokens, heads, kv_heads, dim, pairs, norm, v_norm in (
        ("no norm", 5, 4, 2, 16, 8, None, False),
        ("head norm", 3, 8, 2, 32, 16, "head", False),
        ("head norm, normed values", 3, 4, 4, 64, 32, "head", True),
        ("head norm, values are keys", 4, 4, 1, 32, 16, "head", True),
        ("partial rope, odd width", 2, 3, 1, 24, 4, "head", False),
        ("norm over all heads", 4, 6, 2, 8, 4, "all", False),
        ("no tokens", 0, 2, 1, 8, 4, "head", False),
    ):
        angle = 100 * torch.rand(tokens, pairs, generator=generator)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator).to(dtype)
        width = {None: None, "head": (dim, dim), "all": (heads * dim, kv_heads * dim)}[norm]
        slot = torch.randperm(4 * 4, generator=generator)[:tokens]
        slot[1::3] = -1
        # Keys and values side by side in each page, as slices of one tensor.
        pages = torch.randn(4, 2, 4, kv_heads, dim, generator=generator).to(dtype)
        k_TGD, v_TGD = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        yield (
            label,
            {
                "q_THD": qkv[:, :heads],
                "k_TGD": k_TGD,
                "v_TGD": k_TGD if label.endswith("values are keys") else v_TGD,
                "cos_TF": angle.cos(),
                "sin_TF": angle.sin(),
                "q_weight": None if width is None else torch.rand(width[0], generator=generator).to(dtype),
                "k_weight": None if width is None else torch.rand(width[1], generator=generator).to(dtype),
                "v_norm": v_norm,
                "eps": 1e-6,
                "k_PSGD": pages[:, 0],
                "v_PSGD": pages[:, 1],
                "slot_T": slot.int() if label == "head norm" else slot,
            },
        )


@op(samples=samples, mutates=("k_PSGD", "v_PSGD"))
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
    """Queries, normed and rotated; keys (the same way) and values go to their slots of the pages.

    Norms and rope as in `qk_norm_rope`, slots as in `kv_store`; with `v_norm` each value head is normalised, without
    a weight. v may be the same tensor as k (before norm and rope). Writes over none of q, k and v.
    """
    q_THD, rotated_TGD = qk_norm_rope.reference(q_THD, k_TGD, cos_TF, sin_TF, q_weight, k_weight, eps)
    if v_norm:
        v_TGD = rms_norm.reference(v_TGD, None, eps)
    kv_store.reference(rotated_TGD, v_TGD, k_PSGD, v_PSGD, slot_T)
    return q_THD
