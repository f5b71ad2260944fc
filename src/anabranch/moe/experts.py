"""The routed experts' weights.

E experts, D hidden width, I expert width, F = 2 · I, M rows, K experts per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.moe.dispatch import Dispatched
from anabranch.ops.weight import WHOLE, Layout, Piece, Shard, Weight
from anabranch.parallel.group import ALONE, Group

if TYPE_CHECKING:
    from anabranch.moe.config import MoEConfig


class Experts(nn.Module):
    """Sizes are those of all ranks together; a rank has a share of each expert, or those that it `holds`."""

    def __init__(
        self,
        config: MoEConfig,
        width: int,
        activation: str,
        combine: str,
        group: Group = ALONE,
        holds: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        rank, size = group.rank, group.size
        num_experts, inner = config.num_experts, config.width
        gate_up_shard = down_shard = Shard(0, rank, size, chosen=holds)
        if not holds:
            gate_up_shard, down_shard = Shard(1, rank, size, ((inner, size), (inner, size))), Shard(2, rank, size)
        self.num_experts = num_experts
        """Of all ranks."""
        self.activation = activation
        self.combine = combine
        projections = (("gate_proj", slice(0, inner)), ("up_proj", slice(inner, 2 * inner)))
        every = range(num_experts)
        # A checkpoint has fused 3-D tensors, or one tensor per expert and projection.
        gate_up: tuple[Layout, ...] = (
            (Piece("experts.gate_up_proj"),),
            tuple(Piece(f"experts.{e}.{name}.weight", (e, rows)) for e in every for name, rows in projections),
        )
        down: tuple[Layout, ...] = (
            (Piece("experts.down_proj"),),
            tuple(Piece(f"experts.{e}.down_proj.weight", (e,)) for e in every),
        )
        if config.interleaved:
            gate_up, down = (self._alternating("experts.gate_up_proj", inner),), down[:1]
        self.gate_up_EFD = Weight(
            (num_experts, 2 * inner, width), gate_up, shard=gate_up_shard, transposed=config.interleaved
        )
        self.down_EDI = Weight((num_experts, width, inner), down, shard=down_shard, transposed=config.interleaved)
        self.gate_up_bias_EF = self.down_bias_ED = None
        if config.bias:
            assert config.interleaved, "no family has biases in another layout"
            self.gate_up_bias_EF = Weight(
                (num_experts, 2 * inner), (self._alternating("experts.gate_up_proj_bias", inner),), shard=gate_up_shard
            )
            shard = down_shard if holds else WHOLE
            self.down_bias_ED = Weight((num_experts, width), ((Piece("experts.down_proj_bias"),),), shard=shard)
        self.adds_down_bias = bool(holds) or rank == 0
        """Of ranks that have a part of each expert, one adds it."""

    @staticmethod
    def _alternating(name: str, inner: int) -> Layout:
        """Gate and up rows that take turns in the checkpoint."""
        every = slice(None)
        return (
            Piece(name, (every, slice(0, inner)), (every, slice(0, None, 2))),
            Piece(name, (every, slice(inner, 2 * inner)), (every, slice(1, None, 2))),
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
            None if self.gate_up_bias_EF is None else self.gate_up_bias_EF.data,
            self.down_bias_ED.data if self.down_bias_ED is not None and self.adds_down_bias else None,
            combined=combined,
            combine=self.combine,
        )
        return ops.experts(call)
