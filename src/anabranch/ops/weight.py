"""A weight as a value: its logical shape, format and shard, its tensors and the checkpoint tensors they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch.formats import PLAIN, Format, Grouped, Index, Shape

if TYPE_CHECKING:
    from anabranch.platforms import Platform


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint tensor, or a part of one, that fills a part of a weight."""

    name: str
    """Checkpoint name, relative to the parent of the module that owns the weight."""
    index: Index = ()
    """The part of the weight that it fills; (): all of it."""
    part: Index = ()
    """The part of the checkpoint tensor that is taken; (): all of it."""


BY_INPUT = "scale_by_input"
"""A tensor that a kernel may add to those of a format: scales as [experts, groups of inputs, outputs]."""

Layout = tuple[Piece, ...]
"""Pieces that together fill a weight."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a weight that one rank holds: an equal share of each section of one dimension, or chosen rows."""

    dim: int = 0
    rank: int = 0
    num_ranks: int = 1
    sections: tuple[tuple[int, int], ...] = ()
    """(size, number of shares) of each; with fewer shares than ranks, as many ranks in a row hold the same. (): one
    section, with a share for every rank."""
    chosen: tuple[int, ...] = ()
    """Instead of a share: these, in this order."""

    def ranges(self, size: int) -> Iterator[range]:
        """What this rank holds of a dimension of that size."""
        if self.chosen:
            yield from _runs(self.chosen)
            return
        begin = 0
        for length, shares in self.sections or ((size, self.num_ranks),):
            if length % shares or self.num_ranks % shares:
                raise ValueError(f"{length} rows or columns cannot be divided among {self.num_ranks} ranks")
            count, share = length // shares, self.rank * shares // self.num_ranks
            yield range(begin + share * count, begin + (share + 1) * count)
            begin += length

    def shape(self, shape: Shape) -> Shape:
        """The shape of this rank's part."""
        return (*shape[: self.dim], sum(map(len, self.ranges(shape[self.dim]))), *shape[self.dim + 1 :])

    def pieces(self, layout: Layout, shape: Shape) -> Iterator[Piece]:
        """The pieces of this rank: where they go in its part, and which part of the checkpoint tensor they are.

        Example, rank 1 of 2, dim 0, sections q of 8 rows and k of 4: q[4:8] goes to rows 0:4, k[2:4] to rows 4:6.
        """
        if self.num_ranks == 1:
            yield from layout
            return
        for piece in layout:
            index = piece.index + (slice(None),) * (self.dim + 1 - len(piece.index))
            place, offset = index[self.dim], 0
            for held in self.ranges(shape[self.dim]):
                if isinstance(place, int):  # one of several whole pieces, an expert: this rank has it or not
                    if place in held:
                        ours = offset + place - held.start
                        yield Piece(piece.name, (*index[: self.dim], ours, *index[self.dim + 1 :]), piece.part)
                else:
                    first, end, _ = place.indices(shape[self.dim])
                    low, high = max(first, held.start), min(end, held.stop)
                    if low < high:
                        rows = slice(offset + low - held.start, offset + high - held.start)
                        part = self._part(piece, index, low - first, high - low)
                        yield Piece(piece.name, (*index[: self.dim], rows, *index[self.dim + 1 :]), part)
                offset += len(held)

    def _part(self, piece: Piece, index: Index, skipped: int, count: int) -> Index:
        """Of the part of the checkpoint tensor that is taken, `count` rows after the first `skipped`."""
        # Dimensions that an integer picks in the weight do not exist in the checkpoint tensor.
        dim = sum(not isinstance(place, int) for place in index[: self.dim])
        part = piece.part + (slice(None),) * (dim + 1 - len(piece.part))
        taken = part[dim]
        first, step = ((taken.start or 0), taken.step or 1) if isinstance(taken, slice) else (taken, 1)
        begin = first + skipped * step
        rows = slice(begin, begin + count) if step == 1 else slice(begin, begin + (count - 1) * step + 1, step)
        return (*part[:dim], rows, *part[dim + 1 :])


def _runs(numbers: tuple[int, ...]) -> Iterator[range]:
    """Neighbours as ranges: (4, 5, 0) gives 4-5 and 0."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield range(numbers[begin], numbers[end - 1] + 1)
            begin = end


WHOLE = Shard()


class Weight(nn.Module):
    """A parameter of a model. Layers hold weights, ops take them, the loader fills them, `nbytes` is what they cost."""

    data: torch.Tensor
    """The only tensor of a plain weight."""

    def __init__(
        self,
        shape: Shape,
        layouts: tuple[Layout, ...] = (),
        *,
        format: Format = PLAIN,
        shard: Shard = WHOLE,
        dtype: torch.dtype | None = None,
        transposed: bool = False,
    ) -> None:
        """`layouts`: the ways a checkpoint may keep it; (): as one tensor under the weight's own name. `transposed`:
        plain checkpoints keep its matrices as [inputs, outputs]."""
        super().__init__()
        self.full_shape = tuple(shape)
        self.shard = shard
        self.shape = shard.shape(self.full_shape)
        self.layouts = layouts
        self.transposed = transposed
        self._dtype = dtype or torch.get_default_dtype()
        self.set_format(format)

    @classmethod
    def of(cls, data: torch.Tensor) -> Weight:
        """A plain weight that is this tensor, as an argument of an op."""
        return cls.view(PLAIN, tuple(data.shape), {"data": data})

    @classmethod
    def view(cls, format: Format, shape: Shape, tensors: dict[str, torch.Tensor]) -> Weight:
        """These tensors as an argument of an op: nothing is allocated or copied. No module of a model, and without
        shard and layouts; the dtype of a quantised one is fp32, unless `dense` is given another."""
        weight = cls.__new__(cls)
        weight.__dict__.update(
            format=format, shape=shape, _dtype=torch.float32, _parameters=tensors, _buffers={}, _modules={}
        )
        return weight

    def set_format(self, format: Format) -> None:
        """Take another format, before the weight has memory."""
        self._parameters.clear()
        self.format = format
        for name, spec in format.tensors(self.shape).items():
            dtype = getattr(torch, spec.dtype) if spec.dtype else self._dtype
            self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, dtype=dtype), requires_grad=False))

    def set_dense(self) -> None:
        """Replace a quantised weight by the numbers it stands for."""
        dense = self.dense(self._dtype)
        self._parameters.clear()
        self.format = PLAIN
        self.register_parameter("data", nn.Parameter(dense, requires_grad=False))

    def part_scales(self) -> None:
        """Give every output its own scale, where several share one."""
        assert isinstance(self.format, Grouped)
        scale = self.get_parameter("scale").repeat_interleave(self.format.rows, -2)[..., : self.shape[-2], :]
        self.format = replace(self.format, rows=1)
        self.register_parameter("scale", nn.Parameter(scale.contiguous(), requires_grad=False))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._parameters)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers it stands for, and of those tensors for which the format names no other."""
        return self.data.dtype if self.format is PLAIN else self._dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def extra_repr(self) -> str:
        return f"{list(self.shape)}, {self.format.name}, {self.dtype}"

    def dense(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The numbers themselves, as the format defines them."""
        if self.format is PLAIN and dtype in (None, self.data.dtype):
            return self.data
        return self.format.dequantize(self.tensors, self.shape, dtype or self.dtype)

    def lay_out(self, platform: Platform) -> None:
        """Once, after loading: store the tensors as the device multiplies by them best."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                parameter.data = platform.lay_out(parameter.data)
