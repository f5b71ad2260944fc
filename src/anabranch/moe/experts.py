"""The routed experts' weights.

E experts, D hidden width, I expert width, F = 2 · I, M rows, K experts per row.
"""

import torch
from torch import nn

from anabranch import ops
from anabranch.moe.dispatch import Dispatched
from anabranch.ops.weight import Piece, Shard, Weight
from anabranch.parallel.group import ALONE, Group


class Experts(nn.Module):
    """Sizes are those of all ranks together; a rank has a share of each expert, or all of some."""

    def __init__(
        self,
        num_experts: int,
        width: int,
        inner: int,
        activation: str,
        combine: str,
        group: Group = ALONE,
        expert_parallel: bool = False,
    ) -> None:
        super().__init__()
        rank, size = group.rank, group.size
        gate_up_shard = down_shard = Shard(0, rank, size)
        if not expert_parallel:
            gate_up_shard, down_shard = Shard(1, rank, size, ((inner, size), (inner, size))), Shard(2, rank, size)
        self.num_experts = num_experts
        """Of all ranks."""
        self.activation = activation
        self.combine = combine
        projections = (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, 2 * inner)))
        every = range(num_experts)
        # A checkpoint has fused 3-D tensors, or one tensor per expert and projection.
        self.gate_up_EFD = Weight(
            (num_experts, 2 * inner, width),
            (
                (Piece("experts.gate_up_proj"),),
                tuple(Piece(f"experts.{e}.{name}.weight", (e, rows)) for e in every for name, rows in projections),
            ),
            shard=gate_up_shard,
        )
        self.down_EDI = Weight(
            (num_experts, width, inner),
            ((Piece("experts.down_proj"),), tuple(Piece(f"experts.{e}.down_proj.weight", (e,)) for e in every)),
            shard=down_shard,
        )

    def forward(self, x_MD: torch.Tensor, dispatched: Dispatched, combined: bool = True) -> torch.Tensor:
        """y_MD, each row's weighted sum over its experts here; not `combined`: y_MKD, the rows before that sum, of
        which those of experts that are not here (−1) may be anything."""
        call = ops.ExpertsCall(
            x_MD,
            dispatched.weight_MK,
            dispatched.expert_MK,
            self.gate_up_EFD,
            self.down_EDI,
            self.activation,
            combined=combined,
            combine=self.combine,
        )
        return ops.experts(call)
