"""One file per format of quantised weights, found by listing this folder; `format` has the base class and `plain`.

Knows shapes, names and arithmetic of weights, not layers, kernels or files. Importing it does not import torch.
"""

from anabranch.formats.format import ITEM_BYTES, PLAIN, Format, Index, Shape, TensorSpec, format_of, known, register

__all__ = ["ITEM_BYTES", "PLAIN", "Format", "Index", "Shape", "TensorSpec", "format_of", "known", "register"]
