"""Qwen3 (dense): RMSNorm on each query and key head before rope."""

from dataclasses import replace

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_model, uniform, windowed


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=32768)
    attention = replace(read_attention(keys, default_head_dim=128, default_kv_heads=32), qk_norm="head")
    attentions = windowed(keys, attention, lambda layer_id, first: layer_id >= first)
    width = keys.integer("intermediate_size")
    return read_model(keys, [LayerConfig(mixer=one, mlp_width=width) for one in attentions])


FAMILY = Family(model_types=("qwen3",), read=read, tiny={"qwen3": {"head_dim": 64, "tie_word_embeddings": True}})
