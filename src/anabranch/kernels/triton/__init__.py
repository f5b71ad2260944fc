"""Kernels in Triton, for GPUs. Each runs in Triton's interpreter too, which is how the CPU tests judge it."""

from anabranch.kernels.triton import expert_sort, experts, route

__all__ = ["expert_sort", "experts", "route"]
