"""RMSNorm, with the residual addition that usually comes before it."""

from __future__ import annotations

import torch
from torch import nn

from anabranch import ops


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); the first layer has no residual yet."""
        if residual_TD is None:
            return self(x_TD), x_TD
        return ops.add_rms_norm(x_TD, residual_TD, self.weight, self.eps)

    def add_to(
        self, residual_TD: torch.Tensor, x_TD: torch.Tensor, scale_1: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(residual + norm(x)) · scale."""
        return ops.norm_add(x_TD, self.weight, self.eps, residual_TD, scale_1)
