"""Llama and its many dense relatives: nothing but the shared decoder."""

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_model, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=2048)
    layer = LayerConfig(mixer=read_attention(keys), mlp_width=keys.integer("intermediate_size"))
    return read_model(keys, [layer] * keys.integer("num_hidden_layers"), mlp_bias=keys.flag("mlp_bias", False))


FAMILY = Family(model_types=("llama",), read=read)
