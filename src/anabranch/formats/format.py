"""What the numbers of a weight are: which tensors hold it, and what they mean.

A weight has a logical shape, such as [outputs, inputs]. In the format `plain` one tensor of that shape holds it, in the
model's dtype; a quantised format keeps packed integers, scales, zero points. Kernels accept calls by format, and tuning
tables are keyed by its name. `dequantize` is the definition that every kernel is tested against. What a checkpoint
calls these tensors, and in which shapes it keeps them, is the business of a `Source`.

torch is not imported here: the memory plan adds up bytes without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

    @property
    def kind(self) -> str:
        """What a kernel that multiplies by such weights has among its traits."""
        return self.name

    @property
    def is_block_fp8(self) -> bool:
        """FP8 with a scale for every 128 x 128: kernels may multiply by rows in FP8 with a scale for every 128."""
        return False

    def tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        """The tensors that hold a weight of this logical shape, by name. ValueError if it cannot have this format."""
        return {"data": TensorSpec(shape)}

    def part(self, tensor: str, index: Index, shape: Shape, shared: bool = False) -> Index:
        """The part of `tensor` that holds `index` of a weight of this logical shape. ValueError if there is none, or if
        it holds more than that and is not `shared`: to be copied for each of several parts."""
        return index

    def dequantize(self, tensors: Mapping[str, torch.Tensor], shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The weight as one tensor of its logical shape."""
        return tensors["data"].to(dtype)

    def quantize(self, dense: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors for a dense weight."""
        return {"data": dense}

    def num_bytes(self, shape: Shape, dtype: str) -> int:
        """Memory of a weight in a model of this dtype."""
        specs = self.tensors(shape).values()
        return sum(math.prod(spec.shape) * ITEM_BYTES[spec.dtype or dtype] for spec in specs)


class BFloat16(Format):
    """A plain weight in bf16 of a model that computes in fp32, which holds these numbers exactly."""

    name = "bf16"

    def tensors(self, shape: Shape) -> dict[str, TensorSpec]:
        return {"data": TensorSpec(shape, "bfloat16")}


PLAIN, BF16 = Format(), BFloat16()
_registered: dict[str, Format] = {format.name: format for format in (PLAIN, BF16)}
_parsers: list[Callable[[str], Format | None]] = []
"""For formats with numbers in their names, such as a group size."""


def register(format: Format) -> None:
    """Add a format; it replaces one of the same name."""
    _registered[format.name] = format


def register_parser(parse: Callable[[str], Format | None]) -> None:
    """Add formats by a function from a name to one of them; None: the name is not theirs."""
    _parsers.append(parse)


def named(name: str) -> Format:
    """The format of this name."""
    for parse in _parsers:
        if name not in _registered and (format := parse(name)) is not None:
            _registered[name] = format
    return _registered[name]
