"""OLMoE: RMSNorm over all query heads and over all key heads at once, optional clamp of Q, K and V."""

from dataclasses import replace

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_model, read_moe, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=4096)
    clip = 0.0 if keys.get("clip_qkv") is None else keys.number("clip_qkv")
    layer = LayerConfig(
        mixer=replace(read_attention(keys), qk_norm="all", clip=clip),
        moe=read_moe(keys, count=("num_experts", "num_local_experts"), width="intermediate_size"),
    )
    return read_model(keys, [layer] * keys.integer("num_hidden_layers"), default_eps=1e-5)


FAMILY = Family(model_types=("olmoe",), read=read, tiny={"olmoe": {"intermediate_size": 32}})
