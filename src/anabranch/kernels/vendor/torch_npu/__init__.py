"""Ascend's operators through torch_npu.

Each file says in `accepts` what the operator takes; whatever it does not, the kernels of `torch` and the references do.
What is proven is that torch_npu takes these calls and gives these shapes; how the chip rounds is not.
"""

from anabranch.kernels.vendor.torch_npu import activation, attention, experts, norm, rope_store, route

__all__ = ["activation", "attention", "experts", "norm", "rope_store", "route"]
