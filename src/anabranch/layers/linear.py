"""Linear layers, plain or of several projections packed into one matrix, and the embedding."""

from collections.abc import Sequence

import torch
from torch import nn

from anabranch import ops
from anabranch.formats import Index
from anabranch.ops.weight import Layout, Piece, Weight

Rows = tuple[str, int, int]
"""(a projection of the checkpoint, the first of its rows, how many)."""


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = Weight((outputs, inputs))
        self.bias = Weight((outputs,)) if bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return ops.linear(x_TD, self.weight, None if self.bias is None else self.bias.data)


class PackedLinear(Linear):
    """Projections that a checkpoint keeps apart (`q_proj`, `k_proj`, ...), computed as one."""

    def __init__(self, inputs: int, parts: dict[str, int] | Sequence[Rows], bias: bool = False) -> None:
        """`parts`, in the order of our rows: projections and how many rows each has, or rows of projections."""
        taken: list[tuple[str, int, Index]]
        if isinstance(parts, dict):
            taken = [(part, size, ()) for part, size in parts.items()]
        else:
            taken = [(part, size, (slice(first, first + size),)) for part, first, size in parts]
        super().__init__(inputs, sum(size for _, size, _ in taken), bias)
        for name, weight in self.named_children():
            pieces, begin = [], 0
            for part, size, rows in taken:
                pieces.append(Piece(f"{part}.{name}", (slice(begin, begin + size),), rows))
                begin += size
            layout: Layout = tuple(pieces)
            weight.layouts = (layout,)  # type: ignore[assignment]


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.weight = Weight((vocab_size, width))

    def forward(self, token_T: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(token_T, self.weight.dense())
