"""gpt-oss: attention with sinks and biases, every other layer with a window; a router and experts with biases, whose
feed-forward clamps its values. Published checkpoints keep experts in MXFP4."""

from dataclasses import replace

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_layer_types, read_model, read_moe, uniform

LIMIT = 7.0
"""Of values of the feed-forward; see ops/activation."""
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What a config without rope parameters means."""


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=131_072)
    keys.refuse_unless("swiglu_limit", (LIMIT,), f"only {LIMIT} is supported")
    if not keys.mapping("rope_scaling") and keys.get("rope_parameters") is None:
        keys.raw["rope_parameters"] = YARN
    # A null is not what an absent key is.
    bias = "attention_bias" not in keys.raw or keys.flag("attention_bias", False)
    head_dim = 0 if "head_dim" in keys.raw else 64
    attention = read_attention(keys, default_theta=150_000.0, default_head_dim=head_dim, default_kv_heads=8)
    attention = replace(attention, qkv_bias=bias, output_bias=bias, sinks=True)
    sliding = read_layer_types(keys, lambda layer_id: layer_id % 2 == 0)
    window = (
        keys.integer("sliding_window", default=None if "sliding_window" in keys.raw else 128) if any(sliding) else 0
    )
    moe = read_moe(keys, count=("num_local_experts", "num_experts"), width="intermediate_size", renormalize=True)
    moe = replace(moe, bias=True, interleaved=True)
    layers = [LayerConfig(mixer=replace(attention, window=window if slides else 0), moe=moe) for slides in sliding]
    # Published without a dtype; what is not in MXFP4 is in bfloat16.
    model = read_model(keys, layers, default_eps=1e-5, default_dtype="bfloat16")
    return replace(model, activation="clamped_swiglu")


FAMILY = Family(
    model_types=("gpt_oss",),
    read=read,
    renames=(),
    tiny={
        "gpt_oss": {
            "head_dim": 64,
            "num_local_experts": 6,
            "sliding_window": 32,
            "rope_scaling": YARN | {"original_max_position_embeddings": 64},
        }
    },
)
