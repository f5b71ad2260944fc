"""Qwen3-MoE: RMSNorm on each query and key head before rope, no shared expert, router weights renormalised."""

from dataclasses import replace

from anabranch.models.config import ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import qwen_layers, read_attention, read_model, read_moe, sliding_window, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=32768)
    attention = replace(read_attention(keys, default_kv_heads=4), qk_norm="head", window=sliding_window(keys))
    moe = read_moe(keys, count=("num_experts", "num_local_experts"))
    return read_model(keys, qwen_layers(keys, [attention] * keys.integer("num_hidden_layers"), moe))


FAMILY = Family(model_types=("qwen3_moe",), read=read, tiny={"qwen3_moe": {"head_dim": 64}})
