"""Kernels in Triton, for GPUs. Each runs in Triton's interpreter too, which is how the CPU tests judge it."""

from anabranch.kernels.triton import (
    activation,
    attention,
    cache_keys,
    count_experts,
    decode_inputs,
    experts,
    linear,
    logprobs,
    mask_logits,
    norm,
    penalize,
    rope_store,
    route,
    sample,
)

cache_keys.settle()

__all__ = [
    "activation",
    "attention",
    "count_experts",
    "decode_inputs",
    "experts",
    "linear",
    "logprobs",
    "mask_logits",
    "norm",
    "penalize",
    "rope_store",
    "route",
    "sample",
]
