"""Plain torch, arranged for speed: the kernels of the CPU and the fallback of every torch platform."""

from anabranch.kernels.torch import experts

__all__ = ["experts"]
