"""The only reader of Hugging Face configs: config.json → one ModelConfig, whatever the family calls its keys.

Pure Python without torch, so that `anabranch plan` answers at once. Two dialects are read: hub files (top-level
`rope_theta`, `torch_dtype`) and what transformers 5 writes (`rope_parameters`, `dtype`). Nothing in a model folder is
ever executed; `auto_map` is ignored. Refusals are ConfigError, one line naming the file and the key.

A key that changes what transformers computes is followed as transformers does, its defaults included, or refused by
name; `tests/models/test_config_fuzz.py` compares the two.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from anabranch.models.cache import CacheGroup, CacheSpec, KeepAll, KeepWindow
from anabranch.models.keys import ConfigError, Keys, read_json, shown
from anabranch.models.rope import RopeConfig, read_rope, read_rope_of_layer_type

__all__ = [
    "AttentionConfig",
    "ConfigError",
    "LayerConfig",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "read_config",
]

MAX_EXPERTS = 1 << 17
"""Experts of all layers together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    window: int = 0
    """Tokens a query sees, itself included; 0: all."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys: per head, or over all heads at once."""
    v_norm: bool = False
    value_is_key: bool = False
    """No value projection: the raw key projection serves as value."""
    clip: float = 0.0
    """Queries, keys and values are clamped to ±clip; 0: not."""

    @property
    def cache(self) -> CacheSpec:
        heads = self.num_kv_heads, self.head_dim
        return CacheSpec((heads, heads), KeepWindow(self.window) if self.window else KeepAll())


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    num_experts: int
    top_k: int
    width: int
    renormalize: bool
    shared_width: int = 0
    """Width of the always-on shared expert; 0: none."""
    shared_gate: bool = False
    """The shared expert's result is × sigmoid of a learned projection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    attention: AttentionConfig
    mlp_width: int = 0
    """Width of the dense feed-forward; 0: none. Gemma 4 has both a dense one and experts."""
    moe: MoEConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    activation: Literal["silu", "gelu_tanh"]
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    dtype: str = "float32"
    """What the checkpoint was made in: float32, float16 or bfloat16."""
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        members: dict[CacheSpec, list[int]] = {}
        for layer_id, layer in enumerate(self.layers):
            members.setdefault(layer.attention.cache, []).append(layer_id)
        return tuple(CacheGroup(tuple(layers), spec) for spec, layers in members.items())


def read_config(folder: str | Path, *, quantized: bool = False) -> ModelConfig:
    """Read `config.json` (and end-of-text ids from `generation_config.json`) in a model folder. `quantized`: whoever
    asks reads packed weights too."""
    path = Path(folder) / "config.json"
    keys = Keys(read_json(path), path)
    if not quantized and "quantization_config" in {**keys.raw, **keys.mapping("text_config")}:
        raise keys.fail("'quantization_config': quantised checkpoints are not supported yet; use the original weights")
    model_type = keys.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = difflib.get_close_matches(shown(model_type), FAMILIES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise keys.fail(f"'model_type' = {shown(model_type)} is not supported (supported: {', '.join(FAMILIES)}){hint}")
    architectures = keys.get("architectures", default=[])
    if not isinstance(architectures, list):
        raise keys.fail(f"'architectures' must be a list of names, not {shown(architectures)}")
    for architecture in architectures:
        if not str(architecture).endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise keys.fail(f"'architectures' = {shown(architecture)}: only models that generate text are supported")
    config = FAMILIES[model_type](keys)
    _check(keys, config)
    return replace(config, eos_ids=_eos_ids(keys))


def _eos_ids(keys: Keys) -> tuple[int, ...]:
    generation = keys.path.with_name("generation_config.json")
    where = Keys(read_json(generation), generation) if generation.exists() else keys
    found = where.get("eos_token_id")
    if found is None:
        where = keys
        found = keys.get("eos_token_id", default=keys.mapping("text_config").get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(isinstance(id, bool) or not isinstance(id, int) for id in ids):
        raise where.fail(f"'eos_token_id' must be a token id or a list of them, not {shown(found)}")
    return tuple(ids)


def _check(keys: Keys, config: ModelConfig) -> None:
    """What holds between sizes."""
    for layer in set(config.layers):
        attention, moe = layer.attention, layer.moe
        if attention.num_heads % attention.num_kv_heads:
            raise keys.fail(
                f"'num_attention_heads' = {attention.num_heads} is not a multiple of "
                f"'num_key_value_heads' = {attention.num_kv_heads}"
            )
        if attention.head_dim % 2:
            raise keys.fail(f"'head_dim' = {attention.head_dim} must be even")
        if moe is not None and moe.top_k > moe.num_experts:
            gemma = config.model_type.startswith("gemma4")
            key = "top_k_experts" if gemma else "num_experts_per_tok"
            raise keys.fail(f"{key!r} = {moe.top_k} is more than the {moe.num_experts} experts there are")
    experts = sum(layer.moe.num_experts for layer in config.layers if layer.moe is not None)
    if experts > MAX_EXPERTS:
        raise keys.fail(
            f"'num_hidden_layers' = {len(config.layers)} with their 'num_experts' (or 'num_local_experts') come to "
            f"{experts} experts, more than the {MAX_EXPERTS} supported"
        )


# ---------------------------------------------------------------------------------------------------------------------
# What families share
# ---------------------------------------------------------------------------------------------------------------------

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _attention(
    keys: Keys,
    *,
    default_theta: float = 10_000.0,
    default_head_dim: int = 0,
    default_kv_heads: int = 0,
) -> AttentionConfig:
    """Defaults that are 0: the family derives them, the head dim from the hidden size, key-value heads from heads."""
    num_heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    if not default_head_dim and keys.get("head_dim") is None:
        if hidden % num_heads:
            raise keys.fail(f"'hidden_size' = {hidden} is not a multiple of 'num_attention_heads' = {num_heads}")
        default_head_dim = hidden // num_heads
    if "num_key_value_heads" in keys.raw or not default_kv_heads:
        default_kv_heads = num_heads
    head_dim = keys.integer("head_dim", default=default_head_dim)
    bias = keys.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=default_kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=read_rope(keys, head_dim, default_theta),
        qkv_bias=bias,
        output_bias=bias,
    )


def _model(keys: Keys, layers: list[LayerConfig], **differences: Any) -> ModelConfig:
    """`differences`: fields of ModelConfig, and what the family takes for a key that is absent."""
    if keys.raw.get("is_causal", True) is not True:
        raise keys.fail(f"'is_causal' = {shown(keys.raw['is_causal'])}: only causal attention is supported")
    activation_key = differences.pop("activation_key", "hidden_act")
    name = keys.get(activation_key, default=differences.pop("default_activation", "silu"))
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise keys.fail(f"{activation_key!r} = {shown(name)} is not supported (supported: {', '.join(ACTIVATIONS)})")
    dtype = keys.get("dtype", "torch_dtype", default="float32")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise keys.fail(f"'dtype' = {shown(dtype)} is not supported (supported: float32, float16, bfloat16)")
    return ModelConfig(
        model_type=keys.get("model_type"),
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layers=tuple(layers),
        activation=ACTIVATIONS[name],  # type: ignore[arg-type]
        norm_eps=keys.number("rms_norm_eps", default=differences.pop("default_eps", 1e-6)),
        tie_embeddings=differences.pop("tie_embeddings", keys.flag("tie_word_embeddings", False)),
        max_position=keys.integer("max_position_embeddings"),
        dtype=dtype,
        bos_id=keys.get("bos_token_id"),
        **differences,
    )


def _moe(
    keys: Keys,
    *,
    count: tuple[str, ...] = ("num_experts",),
    top_k: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    renormalize: bool | None = None,
    shared_width: int = 0,
) -> MoEConfig:
    """By the keys that a family has for it. `count`: synonyms; `renormalize` None: the file says."""
    counts = {name: keys.integer(name) for name in count if keys.get(name) is not None}
    if len(set(counts.values())) > 1:
        raise keys.fail(f"{' and '.join(map(repr, counts))} contradict each other: {list(counts.values())}")
    return MoEConfig(
        num_experts=keys.integer(*count),
        top_k=keys.integer(top_k),
        width=keys.integer(width),
        renormalize=keys.flag("norm_topk_prob", False) if renormalize is None else renormalize,
        shared_width=shared_width,
        shared_gate=shared_width > 0,
    )


def _qwen_layers(keys: Keys, attentions: list[AttentionConfig], moe: MoEConfig) -> list[LayerConfig]:
    """Experts, but for Qwen's two ways to make some layers dense."""
    dense = keys.get("mlp_only_layers", default=[])
    if not isinstance(dense, list) or not all(isinstance(layer_id, int) for layer_id in dense):
        raise keys.fail(f"'mlp_only_layers' must be a list of layer numbers, not {shown(dense)}")
    dense, step = set(dense), keys.integer("decoder_sparse_step", default=1)
    return [
        LayerConfig(attention=attention, moe=moe)
        if layer_id not in dense and (layer_id + 1) % step == 0
        else LayerConfig(attention=attention, mlp_width=keys.integer("intermediate_size"))
        for layer_id, attention in enumerate(attentions)
    ]


def _layer_types(keys: Keys, default: Callable[[int], bool]) -> list[bool]:
    """For each layer, whether it is sliding: from `layer_types`, else by the family's rule."""
    num_layers = keys.integer("num_hidden_layers")
    types = keys.get("layer_types")
    if types is None:
        return [default(layer_id) for layer_id in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise keys.fail(f"'layer_types' must name {' or '.join(known)} for each of {num_layers} 'num_hidden_layers'")
    return [kind == "sliding_attention" for kind in types]


def _window(keys: Keys) -> int:
    """`sliding_window` where `use_sliding_window` allows it."""
    return keys.integer("sliding_window") if keys.flag("use_sliding_window", False) else 0


def _windowed(keys: Keys, attention: AttentionConfig, slides: Callable[[int, int], bool]) -> list[AttentionConfig]:
    """Attention of each layer. `slides(layer_id, max_window_layers)` decides where there are no `layer_types`."""
    window, bound = _window(keys), keys.integer("max_window_layers", default=28, minimum=0)
    sliding = _layer_types(keys, lambda layer_id: bool(window) and slides(layer_id, bound))
    if any(sliding) and not window:
        raise keys.fail("'layer_types' names sliding_attention, but 'use_sliding_window' is not true")
    return [replace(attention, window=window if is_sliding else 0) for is_sliding in sliding]


# ---------------------------------------------------------------------------------------------------------------------
# The families, each by what sets it apart
# ---------------------------------------------------------------------------------------------------------------------


def _llama(keys: Keys) -> ModelConfig:
    keys = _uniform(keys, max_position=2048)
    layer = LayerConfig(attention=_attention(keys), mlp_width=keys.integer("intermediate_size"))
    return _model(keys, [layer] * keys.integer("num_hidden_layers"), mlp_bias=keys.flag("mlp_bias", False))


def _qwen3(keys: Keys) -> ModelConfig:
    keys = _uniform(keys, max_position=32768)
    attention = replace(_attention(keys, default_head_dim=128, default_kv_heads=32), qk_norm="head")
    attentions = _windowed(keys, attention, lambda layer_id, first: layer_id >= first)
    return _model(keys, [LayerConfig(attention=one, mlp_width=keys.integer("intermediate_size")) for one in attentions])


def _qwen2_moe(keys: Keys) -> ModelConfig:
    keys = _uniform(keys, max_position=32768)
    attention = replace(_attention(keys, default_kv_heads=16), qkv_bias=keys.flag("qkv_bias", True), output_bias=False)
    attentions = _windowed(keys, attention, lambda layer_id, last: layer_id % 2 == 0 and layer_id < last)
    moe = _moe(keys, shared_width=keys.integer("shared_expert_intermediate_size"))
    return _model(keys, _qwen_layers(keys, attentions, moe))


def _qwen3_moe(keys: Keys) -> ModelConfig:
    keys = _uniform(keys, max_position=32768)
    attention = replace(_attention(keys, default_kv_heads=4), qk_norm="head", window=_window(keys))
    moe = _moe(keys, count=("num_experts", "num_local_experts"))
    return _model(keys, _qwen_layers(keys, [attention] * keys.integer("num_hidden_layers"), moe))


def _mixtral(keys: Keys) -> ModelConfig:
    keys = _uniform(keys, max_position=131_072)
    window = keys.integer("sliding_window") if keys.get("sliding_window") is not None else 0
    attention = _attention(keys, default_theta=1e6, default_kv_heads=8)
    layer = LayerConfig(
        attention=replace(attention, window=window, qkv_bias=False, output_bias=False),
        moe=_moe(keys, count=("num_local_experts", "num_experts"), width="intermediate_size", renormalize=True),
    )
    return _model(keys, [layer] * keys.integer("num_hidden_layers"), default_eps=1e-5)


def _olmoe(keys: Keys) -> ModelConfig:
    keys = _uniform(keys, max_position=4096)
    clip = 0.0 if keys.get("clip_qkv") is None else keys.number("clip_qkv")
    layer = LayerConfig(
        attention=replace(_attention(keys), qk_norm="all", clip=clip),
        moe=_moe(keys, count=("num_experts", "num_local_experts"), width="intermediate_size"),
    )
    return _model(keys, [layer] * keys.integer("num_hidden_layers"), default_eps=1e-5)


def _uniform(keys: Keys, max_position: int) -> Keys:
    """A config whose layers are alike but for what its own keys say; `max_position` is the family's default."""
    if keys.get("per_layer_config"):
        raise keys.fail("'per_layer_config' is supported in gemma4 only")
    return Keys(
        {**keys.raw, "max_position_embeddings": keys.get("max_position_embeddings", default=max_position)}, keys.path
    )


GEMMA4_SIZES = "Gemma 4 E2B and E4B have them; 26B-A4B, which does not, is supported"


def _gemma4(outer: Keys) -> ModelConfig:
    """`gemma4` wraps the text model's config, `gemma4_text`, in `text_config`; of the wrapper's own keys, the text
    model obeys `tie_word_embeddings` alone."""
    if not outer.mapping("text_config"):
        raise outer.fail("key 'text_config' is missing or empty")
    inner: dict[str, Any] = {key: outer.raw.get(key) for key in ("dtype", "torch_dtype", "bos_token_id")}
    inner |= outer.mapping("text_config")
    inner |= {"model_type": "gemma4", "tie_word_embeddings": outer.flag("tie_word_embeddings", True)}
    return _gemma4_text(Keys(inner, outer.path))


def _gemma4_text(keys: Keys) -> ModelConfig:
    keys.refuse_unless("hidden_size_per_layer_input", (0,), f"per-layer inputs are not supported yet ({GEMMA4_SIZES})")
    keys.refuse_unless(
        "num_kv_shared_layers", (0,), f"layers that share keys and values are not supported yet ({GEMMA4_SIZES})"
    )
    keys.refuse_unless("use_bidirectional_attention", ("vision",), "only causal attention is supported")
    if "hidden_size_per_layer_input" not in keys.raw:
        raise keys.fail(
            "key 'hidden_size_per_layer_input' is missing, and its default (256) means per-layer inputs, which are not "
            f"supported yet ({GEMMA4_SIZES})"
        )
    sliding = _layer_types(keys, lambda layer_id: (layer_id + 1) % 6 != 0)
    sliding[-1] = False  # the family's rule: the last layer sees everything
    moe = None
    if keys.flag("enable_moe_block", False):
        moe = _moe(keys, top_k="top_k_experts", renormalize=True)
    layers = []
    attentions: dict[tuple[bool, tuple[int, int]], AttentionConfig] = {}
    for is_sliding, heads in zip(sliding, _gemma4_heads(keys, sliding), strict=True):
        if (is_sliding, heads) not in attentions:
            attentions[is_sliding, heads] = _gemma4_attention(keys, is_sliding, heads)
        attention = attentions[is_sliding, heads]
        layers.append(LayerConfig(attention=attention, mlp_width=keys.integer("intermediate_size"), moe=moe))
    softcap = keys.get("final_logit_softcapping")
    return _model(
        keys,
        layers,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        embedding_scale=keys.integer("hidden_size") ** 0.5,
        logit_softcap=0.0 if softcap is None else keys.number("final_logit_softcapping"),
    )


def _gemma4_attention(keys: Keys, is_sliding: bool, heads: tuple[int, int]) -> AttentionConfig:
    head_dim, num_kv_heads = heads
    bias = keys.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=1.0,
        rope=read_rope_of_layer_type(keys, "sliding_attention" if is_sliding else "full_attention", head_dim),
        window=keys.integer("sliding_window") if is_sliding else 0,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="head",
        v_norm=True,
        value_is_key=not is_sliding and keys.flag("attention_k_eq_v", False),
    )


def _gemma4_heads(keys: Keys, sliding: list[bool]) -> list[tuple[int, int]]:
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


FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4_text,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "llama": _llama,
    "qwen3": _qwen3,
}
