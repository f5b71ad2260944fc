"""RMSNorm, with the residual addition that usually comes before it, and the sum of experts' rows before that.

T tokens, D width, K experts per token.
"""

from dataclasses import dataclass

import torch
from torch import nn

from anabranch import ops


@dataclass(slots=True)
class UnreducedRows:
    """x before its sum over experts, which the next norm computes: x[t] = Σ rows[t, k] over k that have an expert."""

    rows_TKD: torch.Tensor | None
    expert_TK: torch.Tensor

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, experts), once: they are K times as large as x, so an `x` still in scope must not keep them."""
        rows_TKD, self.rows_TKD = self.rows_TKD, None
        assert rows_TKD is not None, "taken already"
        return rows_TKD, self.expert_TK


Hidden = torch.Tensor | UnreducedRows
"""x between two layers."""


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
        self.eps = eps
        self.fp8 = ""
        """How what reads the result may multiply its rows in FP8 (ops/norm); known after loading."""
        self.from_one = False
        """Checkpoints keep the weight less 1."""

    def start_from_one(self) -> None:
        """Before it has memory: its checkpoints keep the weight less 1. Here it is whole, in fp32, because 1 + w has
        more digits than a w in bf16."""
        self.weight = nn.Parameter(torch.empty(self.weight.size(), dtype=torch.float32), requires_grad=False)
        self.from_one = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Hidden, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); the first layer has no residual yet."""
        if isinstance(x, UnreducedRows):
            assert residual_TD is not None, "there are no experts before the first layer"
            return ops.sum_add_rms_norm(*x.take(), residual_TD, self.weight, self.eps, self.fp8)
        if residual_TD is None:
            return self(x), x
        return ops.add_rms_norm(x, residual_TD, self.weight, self.eps, self.fp8)

    def add_to(
        self, residual_TD: torch.Tensor, x_TD: torch.Tensor, scale_1: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(residual + norm(x)) · scale."""
        return ops.norm_add(x_TD, self.weight, self.eps, residual_TD, scale_1)
