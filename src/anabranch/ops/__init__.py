"""What each operator means: plain torch that runs anywhere, defines, serves as fallback and judges every kernel.

Never imports `kernels`: kernels register on ops. Shapes are in the names; each file starts with its legend.
"""

from anabranch.ops.activation import add_gated, cap_logits, gated_activation, multiply_gated
from anabranch.ops.attention import AttentionCall, attention
from anabranch.ops.count_experts import count_experts
from anabranch.ops.decode_inputs import decode_inputs, decode_pages
from anabranch.ops.experts import ExpertsCall, experts
from anabranch.ops.gated_delta import (
    DeltaAcceptCall,
    DeltaDraftsCall,
    GatedDeltaCall,
    gated_delta,
    gated_delta_accept,
    gated_delta_drafts,
)
from anabranch.ops.latent_attention import LatentAttentionCall, latent_attention
from anabranch.ops.latent_store import LatentStoreCall, latent_store
from anabranch.ops.linear import linear, linear_heads
from anabranch.ops.logprobs import logprobs
from anabranch.ops.mask_logits import mask_logits
from anabranch.ops.norm import add_rms_norm, norm_add, rms_norm, sum_add_rms_norm
from anabranch.ops.op import OPS, Op, bind
from anabranch.ops.penalize import penalize
from anabranch.ops.rope_store import RopeStoreCall, rope_store
from anabranch.ops.route import RouteCall, route
from anabranch.ops.sample import SampleCall, sample

__all__ = [
    "OPS",
    "AttentionCall",
    "DeltaAcceptCall",
    "DeltaDraftsCall",
    "ExpertsCall",
    "GatedDeltaCall",
    "LatentAttentionCall",
    "LatentStoreCall",
    "Op",
    "RopeStoreCall",
    "RouteCall",
    "SampleCall",
    "add_gated",
    "add_rms_norm",
    "attention",
    "bind",
    "cap_logits",
    "count_experts",
    "decode_inputs",
    "decode_pages",
    "experts",
    "gated_activation",
    "gated_delta",
    "gated_delta_accept",
    "gated_delta_drafts",
    "latent_attention",
    "latent_store",
    "linear",
    "linear_heads",
    "logprobs",
    "mask_logits",
    "multiply_gated",
    "norm_add",
    "penalize",
    "rms_norm",
    "rope_store",
    "route",
    "sample",
    "sum_add_rms_norm",
]
