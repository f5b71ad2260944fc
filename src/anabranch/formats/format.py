"""What the numbers of a weight are: which tensors hold it, what a checkpoint calls them, and what they mean.

A weight has a logical shape, such as [outputs, inputs]. In the format `plain` one tensor of that shape holds it, in the
model's dtype; a quantised format keeps packed integers, scales, zero points. Kernels accept calls by format, and tuning
tables are keyed by its name. `dequantize` is the definition that every kernel is tested against.

torch is not imported here: the memory plan adds up bytes without it.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
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
_registered: dict[str, Format] = {PLAIN.name: PLAIN}
"""By name: `plain`, and formats that have no file in this package."""


def register(format: Format) -> None:
    """Add a format from outside of this package; it replaces one of the same name."""
    _registered[format.name] = format


def known() -> dict[str, Format]:
    """Every format by name."""
    return _built_in() | _registered


@functools.cache
def _built_in() -> dict[str, Format]:
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name != "format"]
    modules = [importlib.import_module(f"anabranch.formats.{name}") for name in names]
    return {format.name: format for module in modules for format in module.FORMATS}


def format_of(quantization_config: Mapping[str, Any]) -> Format | None:
    """The format that config.json describes; None if it is not known."""
    return next((format for format in known().values() if format.describes(quantization_config)), None)
