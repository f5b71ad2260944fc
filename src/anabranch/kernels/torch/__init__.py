"""Plain torch, arranged for speed: the kernels of the CPU and the fallback of every torch platform."""

from anabranch.kernels.torch import (
    attention,
    decode_inputs,
    experts,
    gated_delta,
    linear,
    norm,
    rope_store,
    route,
    sample,
)

__all__ = ["attention", "decode_inputs", "experts", "gated_delta", "linear", "norm", "rope_store", "route", "sample"]
