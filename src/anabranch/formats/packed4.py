"""Sources that keep numbers of 4 bits, packed into larger integers in one way or another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.formats.format import Format, Index, Shape, TensorSpec
from anabranch.formats.grouped import SCALES, Grouped, pack
from anabranch.formats.source import Source, blocks, stem

if TYPE_CHECKING:
    import torch

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which of the eight numbers in an int32 of AWQ is the first output, the second, ..."""


@dataclass(frozen=True)
class Packed4(Source):
    """int4 of compressed-tensors, GPTQ and AWQ."""

    layout: str
    """`rows` (compressed-tensors): [N, K / 8]; `columns` (GPTQ): [K / 8, N]; `awq`: [K, N / 8] in AWQ's order. Zero
    points are packed along outputs, scales are transposed like the data."""
    group: int
    """Inputs that share a scale; 0: all of them."""
    zero: bool
    zero_offset: int = 0
    """What was subtracted from each of the eight zero points in a word, as one integer."""

    def names(self, name: str) -> dict[str, str]:
        layer = stem(name)
        if not layer:
            return {}
        ends = ("weight_packed", "weight_scale", "weight_zero_point") if self.layout == "rows" else _GPTQ_ENDS
        tensors = ("data", "scale", "zero") if self.zero else ("data", "scale")
        return {tensor: f"{layer}.{end}" for tensor, end in zip(tensors, ends)}

    def format(self, starts: tuple[int, ...] = (), dtypes: Mapping[str, str] = {}) -> Format:
        scale = dtypes.get("scale", "float16")
        return Grouped("int4", 1, self.group, scale if scale in SCALES else "float32", self.zero)

    def stored(self, tensor: str, shape: Shape) -> tuple[TensorSpec, ...]:
        outputs, inputs = shape[-2:]
        groups = inputs // self.group if self.group else 1
        packed = outputs // 8, inputs // 8
        match tensor, self.layout:
            case "data", "rows":
                return (TensorSpec((outputs, packed[1]), "int32"),)
            case "data", "columns":
                return (TensorSpec((packed[1], outputs), "int32"),)
            case "data", _:
                return (TensorSpec((inputs, packed[0]), "int32"),)
            case "zero", "rows":
                return (TensorSpec((packed[0], groups), "int32"),)
            case "zero", _:
                return (TensorSpec((groups, packed[0]), "int32"),)
            case _, "rows":
                return (TensorSpec((outputs, groups)),)
        return (TensorSpec((groups, outputs)),)

    def convert(self, tensor: str, stored: torch.Tensor, shape: Shape, format: Format) -> torch.Tensor:
        import torch

        rows = stored if self.layout == "rows" else stored.T.contiguous()
        if tensor == "scale":
            return rows
        assert isinstance(format, Grouped)
        if tensor == "data" and self.layout != "awq":
            return pack(_neighbours(rows.view(torch.uint8)), format.span(shape[-1]))
        if tensor == "zero":
            rows = rows + 0x11111111 * self.zero_offset  # whole words: a zero point of 0 has borrowed from the next
        # Eight outputs in an int32: [N / 8, ...] to [N, ...].
        numbers = torch.stack([(rows >> 4 * n) & 15 for n in (AWQ_ORDER if self.layout == "awq" else range(8))], 1)
        numbers = numbers.flatten(0, 1).to(torch.uint8)
        return numbers if tensor == "zero" else pack(numbers, format.span(shape[-1]))

    def changes(self, tensor: str, format: Format) -> bool:
        return tensor != "scale" or self.layout != "rows"

    def place(self, tensor: str, outputs: slice, inputs: slice, shape: Shape) -> Index | None:
        if tensor == "data":
            sizes = (8, 1) if self.layout == "awq" else (1, 8)
        else:
            sizes = (8 if tensor == "zero" else 1, self.group or shape[-1])
        rows, columns = blocks(outputs, sizes[0]), blocks(inputs, sizes[1])
        if rows is None or columns is None:
            return None
        return (rows, columns) if self.layout == "rows" else (columns, rows)


_GPTQ_ENDS = ("qweight", "scales", "qzeros")


@dataclass(frozen=True)
class MXFP4(Source):
    """FP4 in groups of 32 with scales that are powers of two."""

    fused: bool
    """gpt-oss: all experts in `…_blocks` [E, N, K / 32, 16] and `…_scales`; else compressed-tensors' [N, K / 2]."""

    def names(self, name: str) -> dict[str, str]:
        layer = stem(name)
        if self.fused:
            return {} if layer else {"data": f"{name}_blocks", "scale": f"{name}_scales"}
        return {"data": f"{layer}.weight_packed", "scale": f"{layer}.weight_scale"} if layer else {}

    def format(self, starts: tuple[int, ...] = (), dtypes: Mapping[str, str] = {}) -> Format:
        return Grouped("fp4", 1, 32, "uint8")

    def stored(self, tensor: str, shape: Shape) -> tuple[TensorSpec, ...]:
        *lead, inputs = shape
        if tensor == "scale":
            return (TensorSpec((*lead, inputs // 32), "uint8"),)
        return (TensorSpec((*lead, inputs // 32, 16) if self.fused else (*lead, inputs // 2), "uint8"),)

    def logical(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-2] * 32) if self.fused else (*shape[:-1], shape[-1] * 2)

    def convert(self, tensor: str, stored: torch.Tensor, shape: Shape, format: Format) -> torch.Tensor:
        assert isinstance(format, Grouped) and tensor == "data"
        return pack(_neighbours(stored.flatten(-2) if self.fused else stored), format.span(shape[-1]))

    def changes(self, tensor: str, format: Format) -> bool:
        return tensor == "data"

    def place(self, tensor: str, outputs: slice, inputs: slice, shape: Shape) -> Index | None:
        columns = blocks(inputs, 32 if self.fused else 2)
        return columns and (outputs, columns)


def _neighbours(data: torch.Tensor) -> torch.Tensor:
    """Numbers of 4 bits from bytes that hold two inputs which follow each other, the first in the lower half."""
    import torch

    return torch.stack((data & 15, data >> 4), -1).flatten(-2)
