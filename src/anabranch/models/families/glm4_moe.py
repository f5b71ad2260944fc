"""GLM-4.5 and GLM-4.6: dense layers, then experts with one that is shared; half of each head turns, and queries and
keys may have a norm. The router's scores are sigmoids, with a bias for the selection."""

from dataclasses import replace

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_model, read_moe, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=131_072)
    for name in ("n_group", "topk_group"):
        keys.refuse_unless(name, (1,), "experts in groups are not supported in this family")
    keys.refuse_unless("scoring_func", ("sigmoid",), "only sigmoid is supported")
    attention = read_attention(keys, default_kv_heads=8, default_rotary=0.5)
    attention = replace(attention, output_bias=False, qk_norm="head" if keys.flag("use_qk_norm", False) else "none")
    moe = read_moe(
        keys,
        count=("n_routed_experts", "num_local_experts"),
        renormalize=keys.flag("norm_topk_prob", True),
        score="sigmoid",
        selection_bias=True,
        scaling=keys.number("routed_scaling_factor", default=1.0),
        shared_width=keys.integer("n_shared_experts", default=1) * keys.integer("moe_intermediate_size"),
        shared_gate=False,
    )
    dense = LayerConfig(mixer=attention, mlp_width=keys.integer("intermediate_size"))
    num_layers = keys.integer("num_hidden_layers")
    num_dense = min(keys.integer("first_k_dense_replace", default=1, minimum=0), num_layers)
    layers = [dense] * num_dense + [LayerConfig(mixer=attention, moe=moe)] * (num_layers - num_dense)
    return read_model(keys, layers, default_eps=1e-5)


FAMILY = Family(
    model_types=("glm4_moe",),
    read=read,
    renames=((".mlp.router.", ".mlp.gate."), (".shared_expert.", ".shared_experts.")),
    has_further_layers=True,
    tiny={"glm4_moe": {"n_routed_experts": 6, "attention_bias": True, "use_qk_norm": True}},
)
