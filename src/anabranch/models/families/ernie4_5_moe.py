"""ERNIE 4.5 (text): experts with shared ones beside them; the router's scores are a softmax, with a bias for the
selection. Pairs that turn are neighbours in checkpoints."""

from dataclasses import replace

from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_model, read_moe, uniform


def read(keys: Keys) -> ModelConfig:
    keys = uniform(keys, max_position=131_072)
    keys.refuse_unless("moe_norm_min", (1e-12,), "only 1e-12 is supported")
    keys.refuse_unless("use_bias", (False,), "biases are not supported in this family")
    keys.refuse_unless("moe_use_aux_free", (True,), "only routers with a bias for the selection are supported")
    top_k = keys.get("moe_k", "num_experts_per_tok")
    keys.refuse_unless("num_experts_per_tok", (top_k,), f"'moe_k' = {top_k} contradicts it")
    keys.raw["moe_k"] = top_k
    num_layers = keys.integer("num_hidden_layers")
    attention = read_attention(keys, default_theta=500_000.0, default_kv_heads=4)
    attention = replace(attention, qkv_bias=False, output_bias=False, neighbours=True)
    num_shared = keys.integer("moe_num_shared_experts", default=2, minimum=0)
    moe = read_moe(
        keys,
        count=("moe_num_experts", "num_experts"),
        top_k="moe_k",
        renormalize=True,
        selection_bias=True,
        shared_width=num_shared * keys.integer("moe_intermediate_size"),
        shared_gate=False,
    )
    interval = keys.integer("moe_layer_interval", default=1)
    first = keys.integer("moe_layer_start_index", default=1, minimum=0)
    last = keys.integer("moe_layer_end_index", default=-1, minimum=-1)
    last = num_layers - 1 if last == -1 else last
    layers = [
        LayerConfig(mixer=attention, moe=moe)
        if (layer_id + 1) % interval == 0 and first <= layer_id <= last
        else LayerConfig(mixer=attention, mlp_width=keys.integer("intermediate_size"))
        for layer_id in range(num_layers)
    ]
    return read_model(keys, layers, default_eps=1e-5, default_tied=True)


def published_name(name: str) -> str:
    return name.replace(".mlp.gate.moe_statics.", ".mlp.moe_statics.")


FAMILY = Family(
    model_types=("ernie4_5_moe",),
    read=read,
    renames=(
        (".mlp.router.e_score", ".mlp.gate.moe_statics.e_score"),
        (".mlp.router.", ".mlp.gate."),
        (".shared_expert.", ".shared_experts."),
    ),
    published_name=published_name,
    ignored=(".rotary_emb.inv_freq", ".mtp_"),
    tiny={"ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_num_shared_experts": 1}},
)
