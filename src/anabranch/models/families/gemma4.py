"""Gemma 4 (text): a dense feed-forward parallel to the experts, a norm before and after every part, a router that reads
the raw residual. Sliding and full layers differ in head dim, key-value heads and rope; attention scale is 1.

`gemma4` wraps the config of the text model, `gemma4_text`, in `text_config`. The layer is in `gemma4_layer`.
"""

from anabranch.layers.config import AttentionConfig
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.keys import Keys, shown
from anabranch.models.readers import read_layer_types, read_model, read_moe, unwrap
from anabranch.models.rope import read_rope_of_layer_type

SUPPORTED = "Gemma 4 E2B and E4B have them; 26B-A4B, which does not, is supported"
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""What a config without rope parameters means."""


def read(keys: Keys) -> ModelConfig:
    if keys.get("model_type") == "gemma4":
        keys = unwrap(keys, default_tied=True)
    keys.refuse_unless("hidden_size_per_layer_input", (0,), f"per-layer inputs are not supported yet ({SUPPORTED})")
    keys.refuse_unless(
        "num_kv_shared_layers", (0,), f"layers that share keys and values are not supported yet ({SUPPORTED})"
    )
    keys.refuse_unless("use_bidirectional_attention", ("vision",), "only causal attention is supported")
    if "hidden_size_per_layer_input" not in keys.raw:
        raise keys.fail(
            "key 'hidden_size_per_layer_input' is missing, and its default (256) means per-layer inputs, which are not "
            f"supported yet ({SUPPORTED})"
        )
    sliding = read_layer_types(keys, lambda layer_id: (layer_id + 1) % 6 != 0)
    sliding[-1] = False  # the family's rule: the last layer sees everything
    moe = None
    if keys.flag("enable_moe_block", False):
        moe = read_moe(keys, top_k="top_k_experts", renormalize=True, router_scales=True)
    layers = []
    attentions: dict[tuple[bool, tuple[int, int]], AttentionConfig] = {}
    for is_sliding, heads in zip(sliding, _heads(keys, sliding), strict=True):
        if (is_sliding, heads) not in attentions:
            attentions[is_sliding, heads] = _attention(keys, is_sliding, heads)
        layers.append(
            LayerConfig(
                mixer=attentions[is_sliding, heads],
                mlp_width=keys.integer("intermediate_size"),
                moe=moe,
                num_norms=4 if moe is None else 7,
                output_scale=True,
            )
        )
    softcap = keys.get("final_logit_softcapping")
    return read_model(
        keys,
        layers,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
        embedding_scale=keys.integer("hidden_size") ** 0.5,
        logit_softcap=0.0 if softcap is None else keys.number("final_logit_softcapping"),
    )


def _attention(keys: Keys, is_sliding: bool, heads: tuple[int, int]) -> AttentionConfig:
    head_dim, num_kv_heads = heads
    bias = keys.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=read_rope_of_layer_type(keys, "sliding_attention" if is_sliding else "full_attention", head_dim, ROPES),
        window=keys.integer("sliding_window") if is_sliding else 0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        v_norm=True,
        value_is_key=not is_sliding and keys.flag("attention_k_eq_v", False),
    )


def _heads(keys: Keys, sliding: list[bool]) -> list[tuple[int, int]]:
    """(head dim, key-value heads) of each layer: `per_layer_config` (transformers) or `global_…` keys (hub)."""
    head_dim = keys.integer("head_dim", default=256)
    num_kv_heads = keys.integer("num_key_value_heads", default=4)
    if "per_layer_config" not in keys.raw:
        full_kv_heads = num_kv_heads
        if keys.flag("attention_k_eq_v", False):
            full_kv_heads = keys.integer("num_global_key_value_heads", default=num_kv_heads)
        full = keys.integer("global_head_dim", default=512), full_kv_heads
        return [(head_dim, num_kv_heads) if is_sliding else full for is_sliding in sliding]
    heads = [(head_dim, num_kv_heads)] * len(sliding)
    for number, overrides in keys.mapping("per_layer_config").items():
        if not number.isdecimal() or int(number) >= len(heads) or not isinstance(overrides, dict):
            raise keys.fail(f"'per_layer_config' must map layer numbers to objects, not {shown(number)}")
        for key in overrides:
            if key not in ("head_dim", "num_key_value_heads"):
                raise keys.fail(f"'per_layer_config': {shown(key)} of a single layer is not supported")
        mine = Keys(overrides, keys.path, "per_layer_config")
        heads[int(number)] = (
            mine.integer("head_dim", default=head_dim),
            mine.integer("num_key_value_heads", default=num_kv_heads),
        )
    return heads


TINY = {
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "rope_parameters": ROPES,
}
FAMILY = Family(
    model_types=("gemma4", "gemma4_text"),
    read=read,
    layer="anabranch.models.families.gemma4_layer:Gemma4Layer",
    prefixes=("model.language_model.", "model.", "language_model.model."),
    renames=((".moe.", "."),),
    ignored=(".rotary_emb.inv_freq", "vision_tower.", "audio_tower.", "embed_vision.", "embed_audio."),
    tiny={"gemma4_text": TINY, "gemma4": {"text_config": TINY | {"tie_word_embeddings": True}}},
)
