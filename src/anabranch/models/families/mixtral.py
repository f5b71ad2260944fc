"""Mixtral: few wide experts, router weights renormalised; on disk `block_sparse_moe.experts.N.w1|w3|w2`."""

from dataclasses import replace

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_model, read_moe, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=131_072)
    window = keys.integer("sliding_window") if keys.get("sliding_window") is not None else 0
    attention = read_attention(keys, default_theta=1e6, default_kv_heads=8)
    layer = LayerConfig(
        mixer=replace(attention, window=window, qkv_bias=False, output_bias=False),
        moe=read_moe(keys, count=("num_local_experts", "num_experts"), width="intermediate_size", renormalize=True),
    )
    return read_model(keys, [layer] * keys.integer("num_hidden_layers"), default_eps=1e-5)


def published_name(name: str) -> str:
    for ours, theirs in ((".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2.")):
        name = name.replace(ours, theirs)
    return name.replace(".mlp.", ".block_sparse_moe.")


FAMILY = Family(model_types=("mixtral",), read=read, published_name=published_name)
