"""The routed experts' weights. E experts, D hidden width, I expert width, F = 2 · I."""

from __future__ import annotations

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.packing import Layout, Piece
from anabranch.moe.dispatch import Plan


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.gate_up_EFD = nn.Parameter(torch.empty(num_experts, 2 * inner, width), requires_grad=False)
        self.down_EDI = nn.Parameter(torch.empty(num_experts, width, inner), requires_grad=False)
        self.activation = activation
        self.num_experts = num_experts

    def forward(self, x_MD: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Each row's weighted sum over its experts here."""
        return ops.experts(x_MD, plan.weight_MK, plan.expert_MK, self.gate_up_EFD, self.down_EDI, self.activation)

    def layouts(self) -> dict[str, tuple[Layout, ...]]:
        """Fused 3-D tensors, or one tensor per expert and projection."""
        num_experts, width, inner = self.down_EDI.shape
        gate, up = slice(0, inner), slice(inner, 2 * inner)
        return {
            "gate_up_EFD": (
                (Piece("experts.gate_up_proj"),),
                tuple(
                    Piece(f"experts.{e}.{name}.weight", (e, rows))
                    for e in range(num_experts)
                    for name, rows in (("gate_proj", gate), ("up_proj", up))
                ),
            ),
            "down_EDI": (
                (Piece("experts.down_proj"),),
                tuple(Piece(f"experts.{e}.down_proj.weight", (e,)) for e in range(num_experts)),
            ),
        }
