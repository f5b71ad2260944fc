"""Plain torch, arranged for speed: the kernels of the CPU and the fallback of every torch platform."""

from anabranch.kernels.torch import attention, experts, kv_store, norm, rope, route

__all__ = ["attention", "experts", "kv_store", "norm", "rope", "route"]
