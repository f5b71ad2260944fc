"""Plain checkpoints, quantised while they are loaded: `--quantization fp8` or `int4`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anabranch.formats.format import Format, Index, Shape, TensorSpec
from anabranch.formats.grouped import SCALES, Grouped
from anabranch.formats.source import Source, common_rows

if TYPE_CHECKING:
    import torch

FORMATS = {"fp8": Grouped("fp8", 128, 128), "int4": Grouped("int4", 1, 128, "bfloat16")}
"""By the value of --quantization. Scales of int4 have the dtype of the checkpoint's weights."""


@dataclass(frozen=True)
class Rounded(Source):
    target: Grouped

    def names(self, name: str) -> dict[str, str]:
        return {"data": name, "scale": name}

    def format(self, starts: tuple[int, ...] = (), dtypes: Mapping[str, str] = {}) -> Grouped:
        scale = dtypes.get("data", self.target.scale) if self.target.bits == 4 else "float32"
        scale = scale if scale in SCALES else "float32"
        return replace(self.target, rows=common_rows(self.target.rows, starts), scale=scale)

    def stored(self, tensor: str, shape: Shape) -> tuple[TensorSpec, ...]:
        return (TensorSpec(shape),)

    def convert(self, tensor: str, stored: torch.Tensor, shape: Shape, format: Format) -> torch.Tensor:
        return format.quantize(stored)[tensor]

    def changes(self, tensor: str, format: Format) -> bool:
        return True

    def place(self, tensor: str, outputs: slice, inputs: slice, shape: Shape) -> Index | None:
        return outputs, inputs  # whole blocks, as `Grouped.part` makes sure


def can_round(target: Grouped, shape: Shape) -> bool:
    """Whether a matrix of this shape is worth quantising: tiny ones are not, and groups must divide the inputs."""
    outputs, inputs = shape[-2:]
    return min(outputs, inputs) >= 32 and (target.bits == 8 or inputs % target.group == 0)
