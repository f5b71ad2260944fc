"""The only reader of Hugging Face configs: config.json → one ModelConfig, whatever the family calls its keys.

Pure Python without torch, so that `anabranch plan` answers at once. Two dialects are read: hub files (top-level
`rope_theta`, `torch_dtype`) and what transformers 5 writes (`rope_parameters`, `dtype`). Nothing in a model folder is
ever executed; `auto_map` is ignored. Refusals are ConfigError, one line naming the file and the key.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal


class ConfigError(ValueError):
    """A config this engine cannot serve; the message is one line with the file, the key and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions. Angles = position × frequency; `rotary_dim` of `head_dim` dimensions turn."""

    kind: Literal["default", "linear", "llama3", "proportional"] = "default"
    theta: float = 10_000.0
    head_dim: int
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


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
class KVGroup:
    """Layers whose keys and values have the same shape and lifetime share a page table."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int

    @property
    def values_per_token(self) -> int:
        """Numbers (keys and values) that one token leaves in all layers of the group."""
        return 2 * self.num_kv_heads * self.head_dim * len(self.layers)


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
    def kv_groups(self) -> tuple[KVGroup, ...]:
        members: dict[tuple[int, int, int], list[int]] = {}
        for layer_id, layer in enumerate(self.layers):
            geometry = layer.attention.num_kv_heads, layer.attention.head_dim, layer.attention.window
            members.setdefault(geometry, []).append(layer_id)
        return tuple(
            KVGroup(layers=tuple(ids), num_kv_heads=heads, head_dim=dim, window=window)
            for (heads, dim, window), ids in members.items()
        )


class Keys:
    """A raw config with the errors built in: every look-up names the file and the key when it fails."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def fail(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path}: {reason}")

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of several synonyms that is present and not null."""
        for name in names:
            if self.raw.get(name) is not None:
                return self.raw[name]
        return default

    def _required(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names, default=default)
        if value is None:
            raise self.fail(f"key {names[0]!r} is missing")
        return value

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        value: int = self._required(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(f"{names[0]!r} must be an integer of at least {minimum}, not {value!r}")
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        value = self._required(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.fail(f"{names[0]!r} must be a positive number, not {value!r}")
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name, default={})
        if not isinstance(value, dict):
            raise self.fail(f"{name!r} must be an object, not {value!r}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default=default)
        if not isinstance(value, bool):
            raise self.fail(f"{name!r} must be true or false, not {value!r}")
        return value

    def refuse_unless(self, name: str, allowed: tuple[object, ...], reason: str) -> None:
        if self.raw.get(name) not in (None, *allowed):
            raise self.fail(f"{name!r} = {self.raw[name]!r}: {reason}")


def read_config(folder: str | Path, *, quantized: bool = False) -> ModelConfig:
    """Read `config.json` (and end-of-text ids from `generation_config.json`) in a model folder. `quantized`: whoever
    asks reads packed weights too."""
    path = Path(folder) / "config.json"
    keys = Keys(_read_json(path), path)
    if not quantized and "quantization_config" in {**keys.raw, **keys.mapping("text_config")}:
        raise keys.fail("'quantization_config': quantised checkpoints are not supported yet; use the original weights")
    model_type = keys.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        near = difflib.get_close_matches(str(model_type), FAMILIES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise keys.fail(f"'model_type' = {model_type!r} is not supported (supported: {', '.join(FAMILIES)}){hint}")
    for architecture in keys.get("architectures", default=[]):
        if not str(architecture).endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise keys.fail(f"'architectures' = {architecture!r}: only models that generate text are supported")
    config = FAMILIES[model_type](keys)
    for layer_id, layer in enumerate(config.layers):
        _check_layer(keys, layer_id, layer)
    return replace(config, eos_ids=_eos_ids(keys))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: not found; is {path.parent} a model folder?") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return raw


def _eos_ids(keys: Keys) -> tuple[int, ...]:
    generation = keys.path.with_name("generation_config.json")
    found = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if found is None:
        found = keys.get("eos_token_id", default=keys.mapping("text_config").get("eos_token_id"))
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(id for id in ids if isinstance(id, int))


def _check_layer(keys: Keys, layer_id: int, layer: LayerConfig) -> None:
    attention, moe = layer.attention, layer.moe
    if attention.num_heads % attention.num_kv_heads:
        raise keys.fail(
            f"'num_attention_heads' = {attention.num_heads} is not a multiple of "
            f"'num_key_value_heads' = {attention.num_kv_heads} (layer {layer_id})"
        )
    if attention.head_dim % 2:
        raise keys.fail(f"'head_dim' = {attention.head_dim} must be even")
    if moe is not None and moe.top_k > moe.num_experts:
        key = "top_k_experts" if "top_k_experts" in keys.mapping("text_config") | keys.raw else "num_experts_per_tok"
        raise keys.fail(f"{key!r} = {moe.top_k} is more than the {moe.num_experts} experts there are")


# ---------------------------------------------------------------------------------------------------------------------
# What families share
# ---------------------------------------------------------------------------------------------------------------------

ROPE_KINDS = ("default", "linear", "llama3", "proportional")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _rope(keys: Keys, head_dim: int, default_theta: float, parameters: dict[str, Any] | None = None) -> RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` + `rope_scaling` (hub)."""
    if parameters is None:
        parameters = {**keys.mapping("rope_scaling"), **keys.mapping("rope_parameters")}
    found = Keys({**parameters, "rope_theta": parameters.get("rope_theta", keys.get("rope_theta"))}, keys.path)
    kind = found.get("rope_type", "type", default="default")
    if kind not in ROPE_KINDS:
        raise keys.fail(f"rope type {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})")
    share = found.number("partial_rotary_factor", default=1.0) if kind == "proportional" else 1.0
    return RopeConfig(
        kind=kind,
        theta=found.number("rope_theta", default=default_theta),
        head_dim=head_dim,
        rotary_dim=int(head_dim * share) // 2 * 2,
        factor=found.number("factor", default=1.0),
        low_freq_factor=found.number("low_freq_factor", default=1.0),
        high_freq_factor=found.number("high_freq_factor", default=4.0),
        original_max_position=found.integer("original_max_position_embeddings", default=8192),
    )


def _attention(keys: Keys, *, default_theta: float = 10_000.0, default_head_dim: int = 0) -> AttentionConfig:
    num_heads = keys.integer("num_attention_heads")
    hidden = keys.integer("hidden_size")
    head_dim = keys.get("head_dim", default=default_head_dim)
    if not head_dim:
        if hidden % num_heads:
            raise keys.fail(f"'hidden_size' = {hidden} is not a multiple of 'num_attention_heads' = {num_heads}")
        head_dim = hidden // num_heads
    head_dim = Keys({"head_dim": head_dim}, keys.path).integer("head_dim")
    bias = keys.flag("attention_bias", False)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=_rope(keys, head_dim, default_theta),
        qkv_bias=bias,
        output_bias=bias,
    )


def _model(keys: Keys, layers: list[LayerConfig], **differences: Any) -> ModelConfig:
    name = keys.get("hidden_activation", "hidden_act", default="silu")
    if name not in ACTIVATIONS:
        raise keys.fail(f"'hidden_act' = {name!r} is not supported (supported: {', '.join(ACTIVATIONS)})")
    dtype = keys.get("dtype", "torch_dtype", default="float32")
    if dtype not in ("float32", "float16", "bfloat16"):
        raise keys.fail(f"'dtype' = {dtype!r} is not supported (supported: float32, float16, bfloat16)")
    return ModelConfig(
        model_type=keys.get("model_type"),
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layers=tuple(layers),
        activation=ACTIVATIONS[name],  # type: ignore[arg-type]
        norm_eps=keys.number("rms_norm_eps", default=differences.pop("default_eps", 1e-6)),
        tie_embeddings=differences.pop("tie_embeddings", keys.flag("tie_word_embeddings", False)),
        max_position=keys.integer("max_position_embeddings", default=32768),
        dtype=dtype,
        bos_id=keys.get("bos_token_id"),
        **differences,
    )


def _moe(
    keys: Keys,
    count: str = "num_experts",
    top_k: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    renormalize: bool | None = None,
    shared_width: int = 0,
) -> MoEConfig:
    """By the keys that a family has for it; `renormalize` None: the file says."""
    return MoEConfig(
        num_experts=keys.integer(count, "num_experts", "num_local_experts"),
        top_k=keys.integer(top_k),
        width=keys.integer(width),
        renormalize=keys.flag("norm_topk_prob", False) if renormalize is None else renormalize,
        shared_width=shared_width,
        shared_gate=shared_width > 0,
    )


def _qwen_layer(keys: Keys, layer_id: int, attention: AttentionConfig, moe: MoEConfig) -> LayerConfig:
    """Experts, but for Qwen's two ways to make some layers dense."""
    dense = keys.get("mlp_only_layers", default=[])
    if not isinstance(dense, list):
        raise keys.fail(f"'mlp_only_layers' must be a list of layer numbers, not {dense!r}")
    if layer_id not in dense and (layer_id + 1) % keys.integer("decoder_sparse_step", default=1) == 0:
        return LayerConfig(attention=attention, moe=moe)
    return LayerConfig(attention=attention, mlp_width=keys.integer("intermediate_size"))


def _layer_types(keys: Keys, default: Callable[[int], bool]) -> list[bool]:
    """For each layer, whether it is sliding: from `layer_types`, else by the family's rule."""
    num_layers = keys.integer("num_hidden_layers")
    types = keys.get("layer_types")
    if types is None:
        return [default(layer_id) for layer_id in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise keys.fail(f"'layer_types' must name {' or '.join(known)} for each of {num_layers} layers")
    return [kind == "sliding_attention" for kind in types]


def _window(keys: Keys) -> int:
    """`sliding_window` where `use_sliding_window` allows it."""
    return keys.integer("sliding_window") if keys.flag("use_sliding_window", False) else 0


# ---------------------------------------------------------------------------------------------------------------------
# The families, each by what sets it apart
# ---------------------------------------------------------------------------------------------------------------------


def _llama(keys: Keys) -> ModelConfig:
    layer = LayerConfig(attention=_attention(keys), mlp_width=keys.integer("intermediate_size"))
    return _model(keys, [layer] * keys.integer("num_hidden_layers"), mlp_bias=keys.flag("mlp_bias", False))


def _qwen3(keys: Keys) -> ModelConfig:
    attention = replace(_attention(keys, default_head_dim=128), qk_norm="head")
    window, first = _window(keys), keys.integer("max_window_layers", default=28, minimum=0)
    slides = _layer_types(keys, lambda layer_id: bool(window) and layer_id >= first)
    attentions = [replace(attention, window=window if sliding else 0) for sliding in slides]
    return _model(keys, [LayerConfig(attention=one, mlp_width=keys.integer("intermediate_size")) for one in attentions])


def _qwen2_moe(keys: Keys) -> ModelConfig:
    attention = replace(_attention(keys), qkv_bias=keys.flag("qkv_bias", True), output_bias=False)
    window, last = _window(keys), keys.integer("max_window_layers", default=28, minimum=0)
    slides = _layer_types(keys, lambda layer_id: bool(window) and layer_id % 2 == 0 and layer_id < last)
    attentions = [replace(attention, window=window if sliding else 0) for sliding in slides]
    moe = _moe(keys, shared_width=keys.integer("shared_expert_intermediate_size"))
    return _model(keys, [_qwen_layer(keys, layer_id, one, moe) for layer_id, one in enumerate(attentions)])


def _qwen3_moe(keys: Keys) -> ModelConfig:
    attention, moe = replace(_attention(keys), qk_norm="head", window=_window(keys)), _moe(keys)
    num_layers = keys.integer("num_hidden_layers")
    return _model(keys, [_qwen_layer(keys, layer_id, attention, moe) for layer_id in range(num_layers)])


def _mixtral(keys: Keys) -> ModelConfig:
    window = keys.integer("sliding_window", default=0, minimum=0)
    layer = LayerConfig(
        attention=replace(_attention(keys, default_theta=1e6), window=window),
        moe=_moe(keys, "num_local_experts", width="intermediate_size", renormalize=True),
    )
    return _model(keys, [layer] * keys.integer("num_hidden_layers"), default_eps=1e-5)


def _olmoe(keys: Keys) -> ModelConfig:
    clip = 0.0 if keys.get("clip_qkv") is None else keys.number("clip_qkv")
    layer = LayerConfig(
        attention=replace(_attention(keys), qk_norm="all", clip=clip),
        moe=_moe(keys, width="intermediate_size"),
    )
    return _model(keys, [layer] * keys.integer("num_hidden_layers"), default_eps=1e-5)


def _gemma4(outer: Keys) -> ModelConfig:
    """`gemma4` wraps the text model's config in `text_config`; `gemma4_text` is that config itself."""
    keys = Keys({**outer.raw, **outer.mapping("text_config")}, outer.path)
    keys.refuse_unless("hidden_size_per_layer_input", (0,), "per-layer inputs are not supported yet")
    keys.refuse_unless("num_kv_shared_layers", (0,), "layers that share keys and values are not supported yet")
    keys.refuse_unless("use_bidirectional_attention", ("vision",), "only causal attention is supported")
    if "hidden_size_per_layer_input" not in keys.raw:
        raise keys.fail("key 'hidden_size_per_layer_input' is missing; its default (256) is not supported yet")

    sliding = _layer_types(keys, lambda layer_id: (layer_id + 1) % 6 != 0)
    sliding[-1] = False  # the family's rule: the last layer sees everything
    ropes = keys.mapping("rope_parameters") or {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    moe = None
    if keys.flag("enable_moe_block", False):
        moe = _moe(keys, top_k="top_k_experts", renormalize=True)
    layers = []
    for layer_id, is_sliding in enumerate(sliding):
        kind = "sliding_attention" if is_sliding else "full_attention"
        head_dim, num_kv_heads = _gemma4_heads(keys, layer_id, is_sliding)
        attention = AttentionConfig(
            num_heads=keys.integer("num_attention_heads"),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=1.0,
            rope=_rope(keys, head_dim, 1e4, ropes.get(kind) or {}),
            window=keys.integer("sliding_window") if is_sliding else 0,
            qkv_bias=keys.flag("attention_bias", False),
            output_bias=keys.flag("attention_bias", False),
            qk_norm="head",
            v_norm=True,
            value_is_key=not is_sliding and keys.flag("attention_k_eq_v", False),
        )
        layers.append(LayerConfig(attention=attention, mlp_width=keys.integer("intermediate_size"), moe=moe))
    return _model(
        keys,
        layers,
        tie_embeddings=keys.flag("tie_word_embeddings", True),
        embedding_scale=keys.integer("hidden_size") ** 0.5,
        logit_softcap=keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") else 0.0,
    )


def _gemma4_heads(keys: Keys, layer_id: int, is_sliding: bool) -> tuple[int, int]:
    """(head dim, key-value heads) of a layer: `per_layer_config` (transformers) or `global_…` keys (hub)."""
    head_dim, num_kv_heads = keys.integer("head_dim", default=256), keys.integer("num_key_value_heads")
    per_layer = keys.get("per_layer_config")
    if per_layer is not None:
        mine = Keys(per_layer.get(str(layer_id), {}), keys.path)
        return mine.integer("head_dim", default=head_dim), mine.integer("num_key_value_heads", default=num_kv_heads)
    if is_sliding:
        return head_dim, num_kv_heads
    if keys.flag("attention_k_eq_v", False):
        num_kv_heads = keys.integer("num_global_key_value_heads", default=num_kv_heads)
    return keys.integer("global_head_dim", default=512), num_kv_heads


FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma4": _gemma4,
    "gemma4_text": _gemma4,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "llama": _llama,
    "qwen3": _qwen3,
}
