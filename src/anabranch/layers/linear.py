"""Linear layers: plain, and several projections of one input packed into one matrix."""

from __future__ import annotations

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.packing import Layout, Piece


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return ops.linear(x_TD, self.weight, self.bias)


class PackedLinear(Linear):
    """Projections that a checkpoint keeps apart (`q_proj`, `k_proj`, ...), done as one."""

    def __init__(self, inputs: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias)
        self.parts = parts

    def layouts(self) -> dict[str, tuple[Layout, ...]]:
        def layout(parameter: str) -> Layout:
            pieces, begin = [], 0
            for part, size in self.parts.items():
                pieces.append(Piece(f"{part}.{parameter}", (slice(begin, begin + size),)))
                begin += size
            return tuple(pieces)

        return {name: (layout(name),) for name, _ in self.named_parameters()}
