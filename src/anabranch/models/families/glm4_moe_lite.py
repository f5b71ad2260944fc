"""GLM-4.7-Flash: as DeepSeek-V3, without groups of experts, and value heads wider than the plain part of keys."""

from anabranch.models.config import ModelConfig
from anabranch.models.families.deepseek_v3 import (
    RENAMES,
    TINY_LATENT,
    one_layer,
    read_latent,
    read_sigmoid_moe,
)
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_model, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=202_752)
    sizes = {"plain_dim": 192, "value_dim": 256, "query_rank": 768, "kv_heads": 20}
    latent, moe = read_latent(keys, **sizes, rotary=1.0), read_sigmoid_moe(keys, scaling=1.8)
    keys.refuse_unless("first_k_dense_replace", (1,), "only the first layer is dense; see 'mlp_layer_types'")
    number = keys.integer("num_hidden_layers")
    kinds = keys.get("mlp_layer_types", default=["dense"] + ["sparse"] * (number - 1))
    if not isinstance(kinds, list) or len(kinds) != number or any(kind not in ("dense", "sparse") for kind in kinds):
        raise keys.fail(f"'mlp_layer_types' must name dense or sparse for each of {number} 'num_hidden_layers'")
    layers = [one_layer(keys, latent, moe if kind == "sparse" else None) for kind in kinds]
    return read_model(keys, layers, default_eps=1e-5)


FAMILY = Family(
    model_types=("glm4_moe_lite",),
    read=read,
    renames=RENAMES,
    has_further_layers=True,
    tiny={"glm4_moe_lite": TINY_LATENT | {"v_head_dim": 64}},
)
