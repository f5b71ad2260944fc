"""The dense gated feed-forward."""

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Linear, PackedLinear


class MLP(nn.Module):
    def __init__(self, width: int, inner: int, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = PackedLinear(width, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down_proj = Linear(inner, width, bias)
        self.activation = activation

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(ops.gated_activation(self.gate_up_proj(x_TD), self.activation))
