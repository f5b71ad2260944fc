"""Parts of config.json that several families write alike: attention, experts, windows, and what every model has.

A missing key means what it means in transformers, family by family. Pure Python without torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from anabranch.layers.config import AttentionConfig, MixerConfig
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.keys import Keys, shown
from anabranch.models.rope import read_rope
from anabranch.moe.config import MoEConfig

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_attention(
    keys: Keys,
    *,
    default_theta: float = 10_000.0,
    default_head_dim: int = 0,
    default_kv_heads: int = 0,
    default_rotary: float | None = None,
) -> AttentionConfig:
    """Defaults that are 0: the family derives them, the head dim from the hidden size, key-value heads from heads.
    `default_rotary`: of a family that turns a part of each head, the share of it."""
    if default_rotary is not None and keys.raw.get("partial_rotary_factor", default_rotary) is None:
        raise keys.fail("'partial_rotary_factor' must be a number, not null")
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
        rope=read_rope(keys, head_dim, default_theta, default_rotary),
        qkv_bias=bias,
        output_bias=bias,
    )


def read_model(
    keys: Keys,
    layers: list[LayerConfig],
    *,
    activation_key: str = "hidden_act",
    default_activation: str = "silu",
    default_eps: float = 1e-6,
    default_tied: bool = False,
    default_dtype: str = "float32",
    **fields: Any,
) -> ModelConfig:
    """What every model has. Defaults are the family's for keys that are absent; `fields` are ModelConfig's own."""
    if keys.raw.get("is_causal", True) is not True:
        raise keys.fail(f"'is_causal' = {shown(keys.raw['is_causal'])}: only causal attention is supported")
    name = keys.get(activation_key, default=default_activation)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise keys.fail(f"{activation_key!r} = {shown(name)} is not supported (supported: {', '.join(ACTIVATIONS)})")
    named = keys.get("dtype", "torch_dtype")
    dtype = default_dtype if named is None else named
    if dtype not in ("float32", "float16", "bfloat16"):
        raise keys.fail(f"'dtype' = {shown(dtype)} is not supported (supported: float32, float16, bfloat16)")
    return ModelConfig(
        model_type=keys.get("model_type"),
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layers=tuple(layers),
        activation=ACTIVATIONS[name],  # type: ignore[arg-type]
        norm_eps=keys.number("rms_norm_eps", default=default_eps),
        tie_embeddings=keys.flag("tie_word_embeddings", default_tied),
        max_position=keys.integer("max_position_embeddings"),
        dtype=dtype,
        names_dtype=named is not None,
        **fields,
    )


def read_moe(
    keys: Keys,
    *,
    count: tuple[str, ...] = ("num_experts",),
    top_k: str = "num_experts_per_tok",
    width: str = "moe_intermediate_size",
    renormalize: bool | None = None,
    shared_width: int = 0,
    shared_gate: bool = True,
    **fields: Any,
) -> MoEConfig:
    """By the keys that a family has for it. `count`: synonyms; `renormalize` None: as `norm_topk_prob` says. `fields`
    are MoEConfig's own."""
    counts = {name: keys.integer(name) for name in count if keys.get(name) is not None}
    if len(set(counts.values())) > 1:
        raise keys.fail(f"{' and '.join(map(repr, counts))} contradict each other: {list(counts.values())}")
    found = MoEConfig(
        num_experts=keys.integer(*count),
        top_k=keys.integer(top_k),
        width=keys.integer(width),
        renormalize=keys.flag("norm_topk_prob", False) if renormalize is None else renormalize,
        shared_width=shared_width,
        shared_gate=shared_gate and shared_width > 0,
        **fields,
    )
    if found.top_k > found.num_experts:
        raise keys.fail(f"{top_k!r} = {found.top_k} is more than the {found.num_experts} experts there are")
    return found


def qwen_layers(keys: Keys, mixers: Sequence[MixerConfig], moe: MoEConfig) -> list[LayerConfig]:
    """Experts, but for Qwen's two ways to make some layers dense."""
    dense = keys.get("mlp_only_layers", default=[])
    if not isinstance(dense, list) or not all(isinstance(layer_id, int) for layer_id in dense):
        raise keys.fail(f"'mlp_only_layers' must be a list of layer numbers, not {shown(dense)}")
    dense, step = set(dense), keys.integer("decoder_sparse_step", default=1)
    return [
        LayerConfig(mixer=mixer, moe=moe)
        if layer_id not in dense and (layer_id + 1) % step == 0
        else LayerConfig(mixer=mixer, mlp_width=keys.integer("intermediate_size"))
        for layer_id, mixer in enumerate(mixers)
    ]


def read_layer_types(keys: Keys, default: Callable[[int], bool], kind: str = "sliding_attention") -> list[bool]:
    """For each layer, whether it is of this kind, not full attention: from `layer_types`, else by the family's rule."""
    num_layers = keys.integer("num_hidden_layers")
    types = keys.get("layer_types")
    if types is None:
        return [default(layer_id) for layer_id in range(num_layers)]
    known = ("full_attention", kind)
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        raise keys.fail(f"'layer_types' must name {' or '.join(known)} for each of {num_layers} 'num_hidden_layers'")
    return [one == kind for one in types]


def sliding_window(keys: Keys) -> int:
    """`sliding_window` where `use_sliding_window` allows it."""
    return keys.integer("sliding_window") if keys.flag("use_sliding_window", False) else 0


def windowed(keys: Keys, attention: AttentionConfig, slides: Callable[[int, int], bool]) -> list[AttentionConfig]:
    """Attention of each layer. `slides(layer_id, max_window_layers)` decides where there are no `layer_types`."""
    window, bound = sliding_window(keys), keys.integer("max_window_layers", default=28, minimum=0)
    sliding = read_layer_types(keys, lambda layer_id: bool(window) and slides(layer_id, bound))
    if any(sliding) and not window:
        raise keys.fail("'layer_types' names sliding_attention, but 'use_sliding_window' is not true")
    return [replace(attention, window=window if is_sliding else 0) for is_sliding in sliding]


def uniform(keys: Keys, max_position: int) -> Keys:
    """A config whose layers are alike but for what its own keys say; `max_position` is the family's default."""
    if keys.get("per_layer_config"):
        raise keys.fail("'per_layer_config' is not supported in this family")
    most = keys.get("max_position_embeddings", default=max_position)
    return Keys({**keys.raw, "max_position_embeddings": most}, keys.path)


def unwrap(outer: Keys, default_tied: bool) -> Keys:
    """The text model's keys of a config that holds them in `text_config`. Of the wrapper's own, the text model obeys
    `tie_word_embeddings` alone."""
    if not outer.mapping("text_config"):
        raise outer.fail("key 'text_config' is missing or empty")
    inner: dict[str, Any] = {key: outer.raw.get(key) for key in ("dtype", "torch_dtype")}
    inner |= outer.mapping("text_config")
    tied = outer.flag("tie_word_embeddings", default_tied)
    inner |= {"model_type": outer.get("model_type"), "tie_word_embeddings": tied}
    return Keys(inner, outer.path)
