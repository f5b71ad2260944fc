"""Ascend's operators through torch_npu.

`accepts` in each file states what the operator takes; all else falls to the kernels of `torch` and the references.
Tested is that torch_npu takes these calls and gives these shapes, not how the chip rounds.
"""

from anabranch.kernels.vendor.torch_npu import activation, attention, experts, norm, rope_store, route

__all__ = ["activation", "attention", "experts", "norm", "rope_store", "route"]
