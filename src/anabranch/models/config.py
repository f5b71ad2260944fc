"""What a model is: config.json → one ModelConfig, whatever the family calls its keys.

Pure Python without torch, so that `anabranch plan` answers at once. The keys are read by the family's file, with
`readers`, `rope` and `keys`. Two dialects are read: hub files (top-level `rope_theta`, `torch_dtype`) and what
transformers 5 writes (`rope_parameters`, `dtype`). Nothing in a model folder is ever executed; `auto_map` is ignored.
Refusals are ConfigError, one line naming the file and the key.

A key that changes what transformers computes is followed as transformers does, its defaults included, or refused by
name; `tests/models/test_config_fuzz.py` compares the two.
"""

from __future__ import annotations

import difflib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from anabranch.formats import Source, sources_of
from anabranch.layers.cache import CacheGroup, CacheSpec
from anabranch.layers.config import AttentionConfig, GatedDeltaConfig, LatentConfig, MixerConfig
from anabranch.models import family
from anabranch.models.keys import ConfigError, Keys, read_json, shown
from anabranch.moe.config import MoEConfig

MAX_EXPERTS = 1 << 17
"""Experts of all layers together."""
CACHE_DTYPES = {"fp8_e4m3": "float8_e4m3fn"}
"""Values of EngineConfig.kv_cache_dtype that are not the model's own dtype, as torch names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    mixer: MixerConfig
    mlp_width: int = 0
    """Width of the dense feed-forward; 0: none. Gemma 4 has both a dense one and experts."""
    moe: MoEConfig | None = None
    num_norms: int = 2
    """RMSNorms of the hidden width."""
    output_scale: bool = False
    """The layer's output is × a learned number."""

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer that is known to have attention."""
        assert isinstance(self.mixer, AttentionConfig), f"{self.mixer} is not attention"
        return self.mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"]
    norm_eps: float
    tie_embeddings: bool
    max_position: int
    dtype: str = "float32"
    """What the checkpoint was made in: float32, float16 or bfloat16."""
    names_dtype: bool = True
    """config.json says so; otherwise `dtype` is the family's default, and the checkpoint may be in another."""
    sources: tuple[Source, ...] = ()
    """How the checkpoint keeps its quantised weights; (): it has none."""
    packed: bool = False
    """The checkpoint's weights are quantised by MLX."""
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    eos_ids: tuple[int, ...] = ()
    draft_layer: LayerConfig | None = None
    """Of models/mtp, if it is used."""

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """With the draft layer, which is the last."""
        return self.layers if self.draft_layer is None else (*self.layers, self.draft_layer)

    @property
    def quantization(self) -> str:
        """The numbers that quantised weights are kept in, in words of --quantization: fp8, int8, int4, fp4; or mlx."""
        kinds = dict.fromkeys(source.format().kind for source in self.sources)
        return "+".join(kinds) or ("mlx" if self.packed else "none")

    def divide(self, rank: int, num_ranks: int, expert_parallel: bool = False) -> ModelConfig:
        """What a rank computes: its share of every mixer. ConfigError, with the cause and other numbers, if the model
        cannot be divided among so many ranks; `expert_parallel`: among them are whole experts."""
        try:
            return self._divide(rank, num_ranks, expert_parallel)
        except ValueError as error:
            others: list[int] = []
            for number in range(1, 2 * num_ranks):
                with suppress(ValueError):
                    self._divide(0, number, expert_parallel)
                    others.append(number)
            raise ConfigError(f"{self.model_type}: {error}; it can be among {str(others)[1:-1]}") from None

    def _divide(self, rank: int, num_ranks: int, expert_parallel: bool) -> ModelConfig:
        if num_ranks == 1:
            return self
        if expert_parallel:
            self.check_experts(num_ranks)
        for layer in self.all_layers:
            widths = {"mlp_width": layer.mlp_width}
            if layer.moe is not None:
                widths["shared_width"] = layer.moe.shared_width
                if not expert_parallel:
                    widths["moe_width"] = layer.moe.width
            for name, width in widths.items():
                if width % num_ranks:
                    raise ValueError(f"{name} = {width} cannot be divided among {num_ranks} ranks")
        mixers = {mixer: mixer.divide(rank, num_ranks) for mixer in {layer.mixer for layer in self.all_layers}}
        divided = [replace(layer, mixer=mixers[layer.mixer]) for layer in self.all_layers]
        last = self.draft_layer and divided.pop()
        return replace(self, layers=tuple(divided), draft_layer=last)

    def check_experts(self, num_ranks: int) -> None:
        """ConfigError if there are not as many experts as ranks."""
        most = min((layer.moe.num_experts for layer in self.layers if layer.moe is not None), default=num_ranks)
        if most < num_ranks:
            raise ConfigError(f"num_experts = {most} cannot be divided among {num_ranks} ranks, at most among {most}")

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        members: dict[CacheSpec, list[int]] = {}
        for layer_id, layer in enumerate(self.all_layers):
            members.setdefault(layer.mixer.cache, []).append(layer_id)
        return tuple(CacheGroup(tuple(layers), spec) for spec, layers in members.items())


def read_config(
    folder: str | Path,
    *,
    quantized: bool = False,
    kv_cache_dtype: str = "auto",
    state_dtype: str = "float32",
    speculative: str = "none",
) -> ModelConfig:
    """Read `config.json` (and end-of-text ids from `generation_config.json`) in a model folder. `quantized`: the caller
    reads quantised weights itself, of any format. `kv_cache_dtype`, `state_dtype`, `speculative`: as in
    EngineConfig."""
    path = Path(folder) / "config.json"
    keys = Keys(read_json(path), path)
    sources = () if quantized else _sources(keys)
    families, model_type = family.known(), keys.get("model_type")
    if not isinstance(model_type, str) or model_type not in families:
        near = difflib.get_close_matches(shown(model_type), families, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise keys.fail(f"'model_type' = {shown(model_type)} is not supported (supported: {', '.join(families)}){hint}")
    architectures = keys.get("architectures", default=[])
    if not isinstance(architectures, list):
        raise keys.fail(f"'architectures' must be a list of names, not {shown(architectures)}")
    for architecture in architectures:
        if not str(architecture).endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise keys.fail(f"'architectures' = {shown(architecture)}: only models that generate text are supported")
    config = families[model_type].read(keys)
    _check(keys, config)
    if kv_cache_dtype in CACHE_DTYPES:
        _check_cache_scheme(keys)
        if any(isinstance(layer.mixer, LatentConfig) for layer in config.layers):
            raise keys.fail(
                f"kv_cache_dtype {kv_cache_dtype}: {model_type} models keep latent rows, which are not supported in "
                "FP8; use kv_cache_dtype auto"
            )
        config = _with_mixers(config, AttentionConfig, cache_dtype=CACHE_DTYPES[kv_cache_dtype])
    if state_dtype == "model":
        config = _with_mixers(config, GatedDeltaConfig, state_dtype=None)
    if speculative == "mtp":
        config = replace(config, draft_layer=_draft_layer(keys, config, families[model_type].has_draft_layer))
    return replace(config, eos_ids=_eos_ids(keys), sources=sources, packed="quantization" in keys.raw)


def _draft_layer(keys: Keys, config: ModelConfig, has_draft_layer: bool) -> LayerConfig:
    """It is as the last layer with attention."""
    with_attention = [layer for layer in config.layers if isinstance(layer.mixer, AttentionConfig)]
    if not has_draft_layer or not with_attention:
        raise keys.fail(f"speculative mtp: {config.model_type} models have no draft layer; use ngram or none")
    return with_attention[-1]


def _check_cache_scheme(keys: Keys) -> None:
    scheme = (_quantization_config(keys) or {}).get("kv_cache_scheme")
    if isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise keys.fail(
            f"'kv_cache_scheme' = {shown(scheme)} is not FP8, so the checkpoint's scales do not fit an FP8 cache; "
            "use kv_cache_dtype auto"
        )


def _with_mixers(config: ModelConfig, kind: Any, **fields: str | None) -> ModelConfig:
    """With these fields in mixers of this kind."""

    def changed(mixer: Any) -> Any:
        return replace(mixer, **fields) if isinstance(mixer, kind) else mixer

    return replace(config, layers=tuple(replace(layer, mixer=changed(layer.mixer)) for layer in config.layers))


def _quantization_config(keys: Keys) -> dict[str, Any] | None:
    for where in (keys.raw, keys.mapping("text_config")):
        found = where.get("quantization_config")
        if found is not None and not isinstance(found, dict):
            raise keys.fail(f"'quantization_config' must be an object, not {shown(found)}")
        if found is not None:
            return found
    return None


def _sources(keys: Keys) -> tuple[Source, ...]:
    found = _quantization_config(keys)
    try:
        return () if found is None else sources_of(found)
    except ValueError as error:
        raise keys.fail(f"'quantization_config': {error}; use the original weights") from None


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
        attention = layer.mixer
        if not isinstance(attention, AttentionConfig):
            continue
        if attention.num_heads % attention.num_kv_heads:
            raise keys.fail(
                f"'num_attention_heads' = {attention.num_heads} is not a multiple of "
                f"'num_key_value_heads' = {attention.num_kv_heads}"
            )
        if attention.head_dim % 2:
            raise keys.fail(f"'head_dim' = {attention.head_dim} must be even")
    experts = sum(layer.moe.num_experts for layer in config.layers if layer.moe is not None)
    if experts > MAX_EXPERTS:
        raise keys.fail(
            f"'num_hidden_layers' = {len(config.layers)} with their 'num_experts' (or 'num_local_experts') come to "
            f"{experts} experts, more than the {MAX_EXPERTS} supported"
        )
