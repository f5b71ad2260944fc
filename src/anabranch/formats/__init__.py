"""Formats of weights, and how checkpoints keep them.

`format` has the base class and `plain`, `grouped` the quantised formats; `source` is the contract between a
checkpoint's tensors and a format, `scaled` and `packed4` implement it, and `methods` reads `quantization_config`. Knows
shapes, names and arithmetic of weights, not layers, kernels or files. Importing it does not import torch.
"""

from anabranch.formats.format import BF16, ITEM_BYTES, PLAIN, Format, Index, Shape, TensorSpec, named, register
from anabranch.formats.grouped import Grouped
from anabranch.formats.source import (
    BF16_SOURCE,
    CACHE_SCALES,
    IGNORED,
    PLAIN_SOURCE,
    Method,
    Source,
    Transposed,
    register_method,
    sources_of,
)

__all__ = [
    "BF16",
    "BF16_SOURCE",
    "CACHE_SCALES",
    "IGNORED",
    "ITEM_BYTES",
    "PLAIN",
    "PLAIN_SOURCE",
    "Format",
    "Grouped",
    "Index",
    "Method",
    "Shape",
    "Source",
    "TensorSpec",
    "Transposed",
    "named",
    "register",
    "register_method",
    "sources_of",
]
