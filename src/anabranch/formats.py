"""What the numbers of a weight are: which tensors hold it, what a checkpoint calls them, and what they mean.

A weight has a logical shape, such as [outputs, inputs]. In the format `plain` one tensor of that shape holds it, in the
model's dtype; a quantised format keeps packed integers, scales, zero points. Kernels accept calls by format, and tuning
tables are keyed by its name. `dequantize` is the definition that every kernel is tested against.

torch is not imported here: the memory plan adds up bytes without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    shape: Shape
    dtype: str = ""
    """A name of torch's; empty: the model's dtype."""


class Format:
    """The format `plain`, and the base class of all others."""

    name = "plain"

    def tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """The tensors that hold a weight of this logical shape, by name. ValueError if it cannot have this format."""
        return {"data": TensorSpec(shape)}

    def checkpoint_names(self, name: str) -> dict[str, str]:
        """For each tensor, its name in a checkpoint that would call the plain weight `name`."""
        return {"data": name}

    def part(self, tensor: str, index: Index) -> Index:
        """The part of `tensor` that holds `index` of the logical weight. ValueError if that cannot be taken apart."""
        return index

    def dequantize(self, tensors: Mapping[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The weight as one tensor of its logical shape."""
        return tensors["data"].to(dtype)

    def quantize(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors for a dense weight."""
        return {"data": dense}

    def describes(self, quantization_config: Mapping[str, Any]) -> bool:
        """Whether a checkpoint whose config.json has this `quantization_config` keeps weights in this format."""
        return False

    def num_bytes(self, shape: Shape, dtype: str) -> int:
        """Memory of a weight in a model of this dtype."""
        specs = self.tensors(shape).values()
        return sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype or dtype] for spec in specs)


PLAIN = Format()
FORMATS: dict[str, Format] = {PLAIN.name: PLAIN}
"""Every known format by name."""


def register(format: Format) -> Format:
    """Make a format known to the loader."""
    if format.name in FORMATS:
        raise ValueError(f"format {format.name!r} is registered twice")
    FORMATS[format.name] = format
    return format


def format_of(quantization_config: Mapping[str, Any] | None) -> Format | None:
    """The format that a config.json names; None: no known one."""
    if quantization_config is None:
        return PLAIN
    return next((format for format in FORMATS.values() if format.describes(quantization_config)), None)
