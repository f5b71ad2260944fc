"""Qwen1.5-MoE and Qwen2-MoE: biased QKV, a shared expert × a sigmoid gate, router weights not renormalised."""

from dataclasses import replace

from anabranch.models.config import ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import qwen_layers, read_attention, read_model, read_moe, uniform, windowed


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=32768)
    attention = read_attention(keys, default_kv_heads=16)
    attention = replace(attention, qkv_bias=keys.flag("qkv_bias", True), output_bias=False)
    attentions = windowed(keys, attention, lambda layer_id, last: layer_id % 2 == 0 and layer_id < last)
    moe = read_moe(keys, shared_width=keys.integer("shared_expert_intermediate_size"))
    return read_model(keys, qwen_layers(keys, attentions, moe))


FAMILY = Family(
    model_types=("qwen2_moe",),
    read=read,
    tiny={"qwen2_moe": {"shared_expert_intermediate_size": 48, "norm_topk_prob": False}},
)
