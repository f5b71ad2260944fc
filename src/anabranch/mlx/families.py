"""What mlx_lm's model files compute of the supported families, and the config keys they read.

mlx_lm ignores keys of config.json that it has no code for: a checkpoint that needs one of them would run and answer
wrongly. So everything in a ModelConfig is either translated here or refused by name. `tests/mlx/test_families.py`
compares every tiny checkpoint with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from anabranch.layers.config import AttentionConfig, RopeConfig
from anabranch.mlx import qwen2_moe
from anabranch.models.config import LayerConfig, ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """What mlx_lm's model file of a family can do."""

    ropes: tuple[str, ...] = ("default",)
    qkv_bias: tuple[bool, ...] = (False,)
    output_bias: tuple[bool, ...] = (False,)
    any_head_dim: bool = True
    """Else hidden size / heads."""
    dense_layers: bool = False
    """Some layers of a model with experts may have none."""
    mixed_windows: bool = False
    """Layers may differ in their window: the file makes a mask for each kind."""
    mlp_bias: bool = False
    activation: str = "silu"
    keys: Callable[[ModelConfig], dict[str, Any]] | None = None
    """The family's own keys, in place of those that most families share."""
    module: ModuleType | None = None
    """A module of ours with Model and Args, in place of mlx_lm's."""


ROPES = ("default", "linear", "llama3")


def check(model: ModelConfig, max_model_len: int) -> None:
    """ValueError naming everything about this model that mlx_lm would ignore."""
    if model.model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model.model_type!r} has not been proven with mlx_lm (proven: {', '.join(FAMILIES)});"
            " use another platform (ANABRANCH_PLATFORM=cpu)"
        )
    if reasons := list(dict.fromkeys(_refusals(model, FAMILIES[model.model_type], max_model_len))):
        raise ValueError(
            f"mlx_lm's {model.model_type} does not compute what this checkpoint needs: {'; '.join(reasons)}."
            " Use another platform (ANABRANCH_PLATFORM=cpu)"
        )


def _refusals(model: ModelConfig, family: ModelFile, max_model_len: int) -> Iterator[str]:
    for layer in model.layers:
        attention, moe = layer.attention, layer.moe
        if attention.rope.kind not in family.ropes:
            yield f"rope type {attention.rope.kind!r}"
        if attention.qkv_bias not in family.qkv_bias:
            yield "biases of queries, keys and values" if attention.qkv_bias else "an attention without biases"
        if attention.output_bias not in family.output_bias:
            yield "a bias of the attention's output"
        if attention.clip:
            yield f"clip_qkv {attention.clip}"
        if not family.any_head_dim and attention.head_dim * attention.num_heads != model.hidden_size:
            yield f"head_dim {attention.head_dim}, which is not hidden_size / num_attention_heads"
        if moe is None and not family.dense_layers and any(other.moe for other in model.layers):
            yield "layers without experts (mlp_only_layers, decoder_sparse_step)"
    if model.mlp_bias and not family.mlp_bias:
        yield "mlp_bias"
    if model.activation != family.activation:
        yield f"hidden_act {model.activation!r}"
    if not family.mixed_windows and len(set(windows(model, max_model_len))) > 1:
        yield "layers that differ in their sliding window"


def windows(model: ModelConfig, max_model_len: int) -> list[int]:
    """Per layer, the tokens it has to keep; 0: all. A window no request can fill is none."""
    sizes = (layer.attention.window for layer in model.layers)
    return [window if window < max_model_len else 0 for window in sizes]


def hub_keys(model: ModelConfig, nested: bool) -> dict[str, Any]:
    """config.json as mlx_lm reads it, in the hub's dialect.

    Nested: the text model's keys are in `text_config`.
    """
    first = model.layers[0]
    keys: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": first.attention.num_heads,
        "rms_norm_eps": model.norm_eps,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_position,
        "tie_word_embeddings": model.tie_embeddings,
    }
    own_keys = FAMILIES[model.model_type].keys
    if own_keys is not None:
        keys |= own_keys(model)
        return {"text_config": keys, "vocab_size": model.vocab_size} if nested else keys
    attention = first.attention
    keys |= {
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "attention_bias": attention.output_bias,
        "mlp_bias": model.mlp_bias,
        "rope_theta": attention.rope.theta,
        "rope_scaling": _rope_scaling(attention.rope),
        "rope_parameters": None,
        # Windows are in the caches: no file but gemma4's makes masks of two kinds.
        "layer_types": None,
        "sliding_window": None,
    }
    dense = next((layer for layer in model.layers if layer.mlp_width), None)
    if dense is not None:
        keys["intermediate_size"] = dense.mlp_width
    sparse = next((layer for layer in model.layers if layer.moe is not None), None)
    return keys if sparse is None else keys | _moe_keys(model, sparse, dense)


def _moe_keys(model: ModelConfig, sparse: LayerConfig, dense: LayerConfig | None) -> dict[str, Any]:
    moe = sparse.moe
    assert moe is not None
    return {
        "num_experts": moe.num_experts,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.width,
        "intermediate_size": moe.width if dense is None else dense.mlp_width,
        "shared_expert_intermediate_size": moe.shared_width,
        "norm_topk_prob": moe.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer_id for layer_id, layer in enumerate(model.layers) if layer.moe is None],
    }


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    return {
        "type": rope.kind,
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }


def _gemma4_keys(model: ModelConfig) -> dict[str, Any]:
    kinds: dict[str, AttentionConfig] = {}
    types = []
    for layer in model.layers:
        types.append("sliding_attention" if layer.attention.window else "full_attention")
        kinds.setdefault(types[-1], layer.attention)
    # A model may lack one of the kinds; its keys are then never read.
    full = kinds.get("full_attention", model.layers[0].attention)
    sliding = kinds.get("sliding_attention", full)
    moe = model.layers[0].moe
    return {
        "model_type": "gemma4_text",
        "intermediate_size": model.layers[0].mlp_width,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_global_key_value_heads": full.num_kv_heads if full.value_is_key else None,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            kind: {
                "rope_type": attention.rope.kind,
                "rope_theta": attention.rope.theta,
                "factor": attention.rope.factor,
                "partial_rotary_factor": attention.rope.rotary_dim / attention.rope.head_dim,
            }
            for kind, attention in kinds.items()
        },
        "sliding_window": max(layer.attention.window for layer in model.layers) or None,
        "layer_types": types,
        "attention_k_eq_v": full.value_is_key,
        "final_logit_softcapping": model.logit_softcap or None,
        "enable_moe_block": moe is not None,
        "num_experts": moe.num_experts if moe else None,
        "top_k_experts": moe.top_k if moe else None,
        "moe_intermediate_size": moe.width if moe else None,
    }


GEMMA4 = ModelFile(ropes=("default", "proportional"), mixed_windows=True, activation="gelu_tanh", keys=_gemma4_keys)
BIASES = (True, False)
FAMILIES = {
    "llama": ModelFile(ropes=ROPES, qkv_bias=BIASES, output_bias=BIASES, mlp_bias=True),
    "qwen3": ModelFile(ropes=ROPES),
    "qwen2_moe": ModelFile(qkv_bias=(True,), any_head_dim=False, module=qwen2_moe),
    "qwen3_moe": ModelFile(dense_layers=True),
    "mixtral": ModelFile(any_head_dim=False),
    "olmoe": ModelFile(ropes=ROPES, qkv_bias=BIASES, output_bias=BIASES),
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4,
}
"""By `model_type`."""
