"""Head norms and rotary positions, by the chip's norm and rotation; the KV write stands beside it, in kv_store.

T tokens, H query heads, G key heads, D head dim, F rotated pairs.
"""

from __future__ import annotations

import torch
import torch_npu

from anabranch import ops


def accepts(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> bool:
    return q_THD.shape[0] > 0


@ops.qk_norm_rope.kernel("torch_npu", on=("npu",), accepts=accepts)
def qk_norm_rope(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Tables as wide as what is rotated, [1, T, 1, 2F]: both of a pair turn by the same angle.
    cos, sin = (torch.cat([table, table], dim=-1)[None, :, None] for table in (cos_TF, sin_TF))
    return (
        _rotate(_head_norm(q_THD, q_weight, eps), cos, sin),
        _rotate(_head_norm(k_TGD, k_weight, eps), cos, sin),
    )


def _head_norm(x_THD: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x_THD
    if weight.numel() == x_THD.shape[-1]:
        return ops.rms_norm(x_THD, weight, eps)
    return ops.rms_norm(x_THD.flatten(-2), weight, eps).view_as(x_THD)


def _rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """In fp32: the operator wants tables of x's dtype, and half precision loses far positions."""
    width = cos.shape[-1]
    turned = torch_npu.npu_rotary_mul(x_THD[..., :width].float()[None], cos, sin)[0].to(x_THD.dtype)
    return turned if width == x_THD.shape[-1] else torch.cat([turned, x_THD[..., width:]], dim=-1)
