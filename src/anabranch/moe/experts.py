"""The experts' weights: the routed ones and, where it is packed with them, the shared one.

E experts, D hidden width, I expert width, F = 2 · I, M rows, K experts per row.
"""

from __future__ import annotations

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.packing import Layout, Piece
from anabranch.moe.dispatch import Plan


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.num_experts = num_experts
        """Routed ones; behind them stand `num_shared` that every token visits."""
        self.num_shared = 0
        self.combine = "fastest"
        self.gate_up_EFD = nn.Parameter(torch.empty(num_experts, 2 * inner, width), requires_grad=False)
        self.down_EDI = nn.Parameter(torch.empty(num_experts, width, inner), requires_grad=False)

    def add_shared(self, num_shared: int) -> None:
        """Make room behind the routed experts for a shared one that is so many times as wide, cut into as many.

        A feed-forward is a sum over its inner channels, so its parts add up to it exactly.
        """
        self.num_shared = num_shared
        for name in ("gate_up_EFD", "down_EDI"):
            weight: torch.Tensor = getattr(self, name)
            more = weight.new_empty(self.num_experts + num_shared, *weight.shape[1:])
            setattr(self, name, nn.Parameter(more, requires_grad=False))

    def forward(self, x_MD: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Each row's weighted sum over its experts here."""
        return self._run(x_MD, plan, combined=True)

    def unsummed(self, x_MD: torch.Tensor, plan: Plan) -> torch.Tensor:
        """y_MKD: what would be summed. Of experts that are not here (−1) it may be anything."""
        return self._run(x_MD, plan, combined=False)

    def _run(self, x_MD: torch.Tensor, plan: Plan, combined: bool) -> torch.Tensor:
        return ops.experts(
            x_MD,
            plan.weight_MK,
            plan.expert_MK,
            self.gate_up_EFD,
            self.down_EDI,
            self.activation,
            combined=combined,
            combine=self.combine,
        )

    def layouts(self) -> dict[str, tuple[Layout, ...]]:
        """Fused 3-D tensors, or one tensor per expert and projection; then the parts of the shared expert."""
        inner, routed = self.down_EDI.shape[2], range(self.num_experts)
        gate, up = slice(0, inner), slice(inner, 2 * inner)
        projections = (("gate_proj", gate), ("up_proj", up))
        gate_up: list[Piece] = []
        down: list[Piece] = []
        for n in range(self.num_shared):
            e, part = self.num_experts + n, slice(n * inner, (n + 1) * inner)
            for name, rows in projections:
                gate_up.append(Piece(f"shared_expert.{name}.weight", (e, rows), (part,)))
            down.append(Piece("shared_expert.down_proj.weight", (e,), (slice(None), part)))
        fused = (slice(0, self.num_experts),) if self.num_shared else ()
        return {
            "gate_up_EFD": (
                (Piece("experts.gate_up_proj", fused), *gate_up),
                (
                    *(Piece(f"experts.{e}.{name}.weight", (e, rows)) for e in routed for name, rows in projections),
                    *gate_up,
                ),
            ),
            "down_EDI": (
                (Piece("experts.down_proj", fused), *down),
                (*(Piece(f"experts.{e}.down_proj.weight", (e,)) for e in routed), *down),
            ),
        }
