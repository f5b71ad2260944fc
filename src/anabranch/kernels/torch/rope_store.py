"""Norms, rope and KV write one after the other, each by the kernel that is bound to it.

T tokens, H query heads, G key-value heads, D head dim, F rotated pairs, P pages, S slots in a page.
"""

from __future__ import annotations

import torch

from anabranch import ops


@ops.rope_store.kernel("torch")
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
    q_THD, rotated_TGD = ops.qk_norm_rope(q_THD, k_TGD, cos_TF, sin_TF, q_weight, k_weight, eps)
    if v_norm:
        v_TGD = ops.rms_norm(v_TGD, None, eps)
    ops.kv_store(rotated_TGD, v_TGD, k_PSGD, v_PSGD, slot_T)
    return q_THD
