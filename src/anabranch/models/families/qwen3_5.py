"""Qwen3.5 and Qwen3.6 (text), dense and with experts: three layers with a gated delta net, then one with attention.

Attention has a gate on its result and turns a quarter of each head; norms are kept less 1; experts have a shared one,
times a sigmoid gate. `qwen3_5` and `qwen3_5_moe` wrap the config of the text model in `text_config`. Positions in three
dimensions (`mrope_section`) are equal for text, which makes them plain ones. Images are not read, the draft layer
(`mtp`) only for speculation.
"""

from dataclasses import replace

from anabranch.layers.config import GatedDeltaConfig, MixerConfig
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys
from anabranch.models.readers import read_attention, read_layer_types, read_model, read_moe, uniform, unwrap


def read(keys: Keys) -> ModelConfig:
    model_type = keys.get("model_type")
    if not model_type.endswith("_text"):
        keys = unwrap(keys, default_tied=False)
    keys = uniform(keys, max_position=32768)
    routed = "_moe" in model_type
    mixers = read_mixers(keys, default_kv_heads=2 if routed else 4)
    if routed:
        moe = read_moe(keys, renormalize=True, shared_width=keys.integer("shared_expert_intermediate_size"))
        return read_model(keys, [LayerConfig(mixer=mixer, moe=moe) for mixer in mixers])
    width = keys.integer("intermediate_size")
    return read_model(keys, [LayerConfig(mixer=mixer, mlp_width=width) for mixer in mixers])


def read_mixers(keys: Keys, *, default_kv_heads: int = 2, interleaved: bool = False) -> list[MixerConfig]:
    """Of each layer; also of Qwen3-Next. `interleaved`: how checkpoints keep the delta nets' projections."""
    keys.refuse_unless("hidden_act", ("silu",), "the convolution would use it too, and only silu is supported there")
    keys.refuse_unless("attn_output_gate", (True,), "only attention with a gate is supported")
    attention = read_attention(keys, default_head_dim=256, default_kv_heads=default_kv_heads, default_rotary=0.25)
    delta = GatedDeltaConfig(
        num_key_heads=keys.integer("linear_num_key_heads", default=16),
        num_heads=keys.integer("linear_num_value_heads", default=32),
        key_dim=keys.integer("linear_key_head_dim", default=128),
        value_dim=keys.integer("linear_value_head_dim", default=128),
        conv_width=keys.integer("linear_conv_kernel_dim", default=4, minimum=2),
        interleaved=interleaved,
    )
    if delta.num_heads % delta.num_key_heads:
        raise keys.fail(
            f"'linear_num_value_heads' = {delta.num_heads} is not a multiple of 'linear_num_key_heads' = "
            f"{delta.num_key_heads}"
        )
    interval = keys.integer("full_attention_interval", default=4)
    linear = read_layer_types(keys, lambda layer_id: (layer_id + 1) % interval != 0, "linear_attention")
    gated = replace(attention, qk_norm="head", gated=True)
    return [delta if is_linear else gated for is_linear in linear]


TINY_DELTA = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 64,
}
TINY_MOE = TINY_DELTA | {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 48}
TINY = TINY_DELTA | {"model_type": "qwen3_5_text"}
FAMILY = Family(
    model_types=("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text"),
    read=read,
    prefixes=("model.language_model.", "model."),
    ignored=(".rotary_emb.inv_freq", "model.visual.", "mtp."),
    norms_from_one=True,
    has_draft_layer=True,
    tiny={
        "qwen3_5_moe_text": TINY_MOE,
        "qwen3_5_moe": {"text_config": TINY_MOE},
        "qwen3_5_text": TINY,
        "qwen3_5": {"text_config": TINY},
    },
)
