"""Kernels in Triton, for GPUs. Each runs in Triton's interpreter too, which is how the CPU tests judge it."""

from anabranch.kernels.compiling.versions import settle_cache_keys
from anabranch.kernels.triton import (  # noqa: F401  importing registers their kernels
    activation,
    attention,
    count_experts,
    decode_inputs,
    experts,
    gated_delta,
    latent_attention,
    latent_store,
    linear,
    linear_fixed,
    logprobs,
    mask_logits,
    norm,
    penalize,
    rope_store,
    route,
    sample,
)

settle_cache_keys()
