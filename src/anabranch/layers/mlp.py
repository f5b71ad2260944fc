"""The dense gated feed-forward."""

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Linear, PackedLinear
from anabranch.ops.weight import Shard
from anabranch.parallel.group import ALONE, Group


class MLP(nn.Module):
    def __init__(
        self, width: int, inner: int, activation: str, bias: bool = False, group: Group = ALONE, partial: bool = False
    ) -> None:
        """`partial`: the result is this rank's term of the sum over the group."""
        super().__init__()
        rank, size = group.rank, group.size
        sections = ((inner, size), (inner, size))
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = PackedLinear(width, parts, bias, Shard(0, rank, size, sections))
        self.down_proj = Linear(inner, width, bias, Shard(1, rank, size))
        self.activation = activation
        self.group = ALONE if partial else group

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        y_TD = self.down_proj(ops.gated_activation(self.gate_up_proj(x_TD), self.activation))
        return self.group.all_reduce(y_TD)
