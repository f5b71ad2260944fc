"""Beads are quick at norms."""

from __future__ import annotations

import torch

from anabranch import ops


def accepts(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> bool:
    return x.dtype == torch.float32 and weight_D is not None


@ops.rms_norm.kernel("abacus", on=("abacus",), accepts=accepts)
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    assert weight_D is not None
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D
