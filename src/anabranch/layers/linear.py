"""Linear layers, plain or of several projections packed into one matrix, and the embedding."""

from collections.abc import Sequence

import torch
from torch import nn

from anabranch import ops
from anabranch.formats import BF16, Index, Shape
from anabranch.ops.weight import WHOLE, Layout, Piece, Shard, Weight
from anabranch.parallel.group import ALONE, Group

Rows = tuple[str, int, int]
"""(a projection of the checkpoint, the first of its rows, how many)."""


class Linear(nn.Module):
    """Sizes are those of all ranks together. A rank that has a share of the inputs computes a term of the sum."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.weight = Weight((outputs, inputs), shard=shard)
        self.bias = Weight((outputs,), shard=shard if shard.dim == 0 else WHOLE) if bias else None
        self.adds_bias = bias and (shard.dim == 0 or shard.rank == 0)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        bias = self.bias.data if self.bias is not None and self.adds_bias else None
        return ops.linear(x_TD, self.weight, bias)


class PackedLinear(Linear):
    """Projections that a checkpoint keeps apart (`q_proj`, `k_proj`, ...), computed as one."""

    def __init__(
        self, inputs: int, parts: dict[str, int] | Sequence[Rows], bias: bool = False, shard: Shard = WHOLE
    ) -> None:
        """`parts`, in the order of our rows: projections and how many rows each has, or rows of projections."""
        taken: list[tuple[str, int, Index]]
        if isinstance(parts, dict):
            taken = [(part, size, ()) for part, size in parts.items()]
        else:
            taken = [(part, size, (slice(first, first + size),)) for part, first, size in parts]
        super().__init__(inputs, sum(size for _, size, _ in taken), bias, shard)
        for name, weight in self.named_children():
            pieces, begin = [], 0
            for part, size, rows in taken:
                pieces.append(Piece(f"{part}.{name}", (slice(begin, begin + size),), rows))
                begin += size
            layout: Layout = tuple(pieces)
            weight.layouts = (layout,)  # type: ignore[assignment]


class WeightAlone(nn.Module):
    """A weight under its name in checkpoints, for an op of the module that owns it."""

    def __init__(self, shape: Shape, shard: Shard) -> None:
        super().__init__()
        self.weight = Weight(shape, shard=shard)


def vocabulary_shard(vocab_size: int, group: Group) -> Shard:
    """Of an embedding or a head; whole where the vocabulary cannot be divided."""
    return WHOLE if vocab_size % group.size else Shard(0, group.rank, group.size)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int, group: Group = ALONE) -> None:
        super().__init__()
        self.weight = Weight((vocab_size, width), shard=vocabulary_shard(vocab_size, group))
        self.group = group

    def forward(self, token_T: torch.Tensor) -> torch.Tensor:
        weight_VD = self.weight.data if self.weight.format is BF16 else self.weight.dense()
        if self.weight.shard.num_ranks == 1:
            return nn.functional.embedding(token_T, weight_VD).to(self.weight.dtype)
        # Each rank has the rows of its tokens; those of others are zeros.
        local_T = token_T - self.group.rank * weight_VD.shape[0]
        here_T = (local_T >= 0) & (local_T < weight_VD.shape[0])
        x_TD = nn.functional.embedding(torch.where(here_T, local_T, 0), weight_VD).to(self.weight.dtype)
        return self.group.all_reduce(torch.where(here_T[:, None], x_TD, 0))
