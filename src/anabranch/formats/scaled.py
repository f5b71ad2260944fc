"""Sources that keep one number a byte in the weight's own shape, with a scale for a block, a row or the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.formats.format import Format, Shape, TensorSpec
from anabranch.formats.grouped import STORED, Grouped
from anabranch.formats.source import Source, common_rows

if TYPE_CHECKING:
    import torch

UE8M0 = "float8_e8m0fnu"
"""Scales that are powers of two, where they are stored as their exponents."""


@dataclass(frozen=True)
class Scaled(Source):
    numbers: str
    """fp8 or int8."""
    rows: int
    """Outputs that share a scale; 0: all of them."""
    group: int
    """Inputs that share a scale; 0: all of them."""
    suffix: str
    """What the name of the scale adds to that of the weight."""

    def names(self, name: str) -> dict[str, str]:
        return {"data": name, "scale": name + self.suffix}

    def format(self, starts: tuple[int, ...] = (), dtypes: Mapping[str, str] = {}) -> Format:
        # Pieces with one scale each share no row.
        return Grouped(self.numbers, common_rows(self.rows, starts) if self.rows else 1, self.group)

    def stored(self, tensor: str, shape: Shape) -> tuple[TensorSpec, ...]:
        if tensor == "data":
            return (TensorSpec(shape, STORED[self.numbers]),)
        *lead, outputs, inputs = shape
        groups = -(-inputs // self.group) if self.group else 1
        if self.rows:
            blocks = -(-outputs // self.rows)
            shapes: tuple[Shape, ...] = ((blocks, groups), (blocks,))[: 2 if groups == 1 else 1]
        else:
            shapes = ((1,), (), (1, 1))
        return tuple(TensorSpec((*lead, *shape), dtype) for dtype in ("", UE8M0) for shape in shapes)

    def convert(self, tensor: str, stored: torch.Tensor, shape: Shape, format: Format) -> torch.Tensor:
        if tensor == "data":
            return stored
        assert isinstance(format, Grouped)
        *lead, outputs, inputs = shape
        groups, stored = format.num_groups(inputs), stored.float()  # torch rearranges few dtypes of 8 bits
        if not self.rows:
            return stored.reshape(*lead, 1, 1).expand(*lead, outputs, groups)
        stored = stored.reshape(*lead, -1, groups)
        return stored.repeat_interleave(self.rows // format.rows, -2)[..., : -(-outputs // format.rows), :]

    def changes(self, tensor: str, format: Format) -> bool:
        assert isinstance(format, Grouped)
        return tensor == "scale" and (self.rows != format.rows or not self.group)
