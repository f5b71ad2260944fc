"""Head norms and rope in few calls: x · cos + (x with its halves swapped) · (−sin, sin).

T tokens, H query heads, G key heads, D head dim, F rotated pairs.
"""

from __future__ import annotations

import torch

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
    return q_THD.dtype == torch.float32 and 2 * cos_TF.shape[1] == q_THD.shape[2]


@ops.qk_norm_rope.kernel("torch", on=("cpu", "fake"), accepts=accepts)
def qk_norm_rope(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    cos_TF: torch.Tensor,
    sin_TF: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos = torch.cat([cos_TF, cos_TF], 1)[:, None]
    sin = torch.cat([-sin_TF, sin_TF], 1)[:, None]
    half = cos_TF.shape[1]
    rotated = []
    for x, weight in ((q_THD, q_weight), (k_TGD, k_weight)):
        if weight is not None and weight.numel() == x.shape[2]:
            x = torch.rms_norm(x, x.shape[2:], weight, eps)
        elif weight is not None:
            x = torch.rms_norm(x.flatten(1), weight.shape, weight, eps).view(x.shape)
        rotated.append(torch.addcmul(x * cos, x.roll(half, -1), sin))
    return rotated[0], rotated[1]
