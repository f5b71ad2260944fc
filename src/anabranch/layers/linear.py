"""Linear layers, plain or of several projections packed into one matrix, and the embedding."""

import torch
from torch import nn

from anabranch import ops
from anabranch.ops.weight import Layout, Piece, Weight


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = Weight((outputs, inputs))
        self.bias = Weight((outputs,)) if bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return ops.linear(x_TD, self.weight, None if self.bias is None else self.bias.data)


class PackedLinear(Linear):
    """Projections that a checkpoint keeps apart (`q_proj`, `k_proj`, ...), computed as one."""

    def __init__(self, inputs: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(inputs, sum(parts.values()), bias)
        for name, weight in self.named_children():
            pieces, begin = [], 0
            for part, size in parts.items():
                pieces.append(Piece(f"{part}.{name}", (slice(begin, begin + size),)))
                begin += size
            layout: Layout = tuple(pieces)
            weight.layouts = (layout,)  # type: ignore[assignment]


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = Weight((vocab_size, width))

    def forward(self, token_T: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(token_T, self.weight.dense())
