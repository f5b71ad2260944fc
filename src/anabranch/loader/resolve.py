"""Every "auto" of an EngineConfig, decided once from the model and the platform, and logged."""

import logging
from dataclasses import replace
from typing import Any

from anabranch.config import AUTO, DTYPES, SERVED_TOKENS, EngineConfig
from anabranch.models.config import ModelConfig
from anabranch.platforms import Platform

log = logging.getLogger(__name__)


def resolve(config: EngineConfig, model: ModelConfig, platform: Platform) -> EngineConfig:
    """Replace every auto by a value, except for the number of pages, which depends on memory; ValueError for what the
    platform or the model cannot do."""
    if config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len {config.max_model_len} is more than the model's own limit of {model.max_position} tokens"
        )
    if config.graphs not in ("auto", "none"):
        refused = f"graphs {config.graphs}: platform {platform.name!r}"
        if not platform.has("graphs"):
            raise ValueError(f"{refused} captures no graphs; use auto or none")
        if platform.graph_mode == "pieces" and config.graphs in ("full", "decode"):
            raise ValueError(f"{refused} captures only what is between attentions; use auto, pieces or compiled")
    if config.num_ranks > 1 and not platform.divides_models:
        name = "tensor_parallel_size" if config.tensor_parallel_size > 1 else "data_parallel_size"
        raise ValueError(f"{name}: not on platform {platform.name!r}; use 1")
    if config.data_parallel_size > 1:
        _check_data_parallel(config, model)
    for name in ("expert_copies", "rebalance_interval"):
        if getattr(config, name) and not (config.expert_parallel and config.num_ranks > 1):
            raise ValueError(f"{name} is about experts on several ranks: it needs them, and expert_parallel")
    if config.rebalance_interval and not config.expert_load_interval:
        raise ValueError("rebalance_interval needs the tokens of experts: expert_load_interval must not be 0")
    if config.kv_cache_dtype == "fp8_e4m3" and not platform.fp8_cache:
        raise ValueError(
            f"kv_cache_dtype fp8_e4m3: platform {platform.name!r} ({platform.describe()}) keeps keys and values in the "
            "dtype it computes in; use auto"
        )
    if config.deterministic:
        where = f"{config.num_ranks} ranks" if config.num_ranks > 1 else f"platform {platform.name!r}"
        if config.num_ranks > 1 or not platform.deterministic:
            raise ValueError(f"deterministic: not yet with {where}, only on one CPU or NVIDIA GPU; leave it out")
        if config.graphs == "compiled":
            raise ValueError("deterministic: not with graphs compiled, whose kernels depend on sizes; use another mode")
        states = not all(layer.mixer.cache.policy.per_token for layer in model.layers)
        if states and platform.name != "cpu" and config.state_dtype != "float32":  # rounded after each chunk
            raise ValueError("deterministic: on a GPU states must be kept in float32; leave state_dtype out")
    if config.speculative != "none":
        refused = f"speculative {config.speculative}: not yet"
        with_states = (layer.mixer for layer in model.layers if not layer.mixer.cache.policy.per_token)
        if not all(getattr(mixer, "verifies_drafts", False) for mixer in with_states):
            raise ValueError(f"{refused} with the states of {model.model_type}; use none")
        if not platform.verifies_drafts:
            raise ValueError(f"{refused} on platform {platform.name!r}; use none")
    values = {
        "dtype": resolve_dtype(config.dtype, model, platform),
        "max_model_len": model.max_position,
        "max_num_batched_tokens": SERVED_TOKENS if config.serving else platform.batch_tokens,
        "page_size": platform.page_size,
        "memory_fraction": platform.memory_fraction,
        "graphs": platform.graph_mode if config.data_parallel_size == 1 else captured_together(platform),
        "moe_combine": "fastest",
        "shared_expert": "stream" if platform.has("streams") else "inline",
        "generation_config": "model",
        "kv_cache_dtype": "model",
    }
    chosen: dict[str, Any] = {name: value for name, value in values.items() if getattr(config, name) in ("auto", AUTO)}
    for name, value in chosen.items():
        log.info("%s: auto → %s", name, value)
    return replace(config, **chosen)


def captured_together(platform: Platform) -> str:
    """Where ranks have requests of their own: only steps of single tokens are padded to the same size on all."""
    return "decode" if platform.graph_mode == "full" else "none"


def _check_data_parallel(config: EngineConfig, model: ModelConfig) -> None:
    if config.num_ranks // config.nodes % config.tensor_parallel_size:
        raise ValueError(
            f"data_parallel_size {config.data_parallel_size} on {config.nodes} nodes: each must have whole groups of "
            f"tensor_parallel_size {config.tensor_parallel_size} ranks"
        )
    if all(layer.moe is None for layer in model.layers):
        raise ValueError(
            f"data_parallel_size divides experts, and {model.model_type} has none; start an engine for each device"
        )
    model.check_experts(config.num_ranks)
    if config.speculative == "mtp":
        raise ValueError("speculative mtp: not yet with data_parallel_size; use ngram or none")
    if config.graphs not in ("auto", "decode", "none"):
        raise ValueError(f"graphs {config.graphs}: not with data_parallel_size; use auto, decode or none")


def resolve_dtype(dtype: str, model: ModelConfig, platform: Platform) -> str:
    """Auto: the checkpoint's own, as far as the platform computes in it; packed weights are computed in their own."""
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    if dtype != "auto" or model.packed:
        return model.dtype if dtype == "auto" else dtype
    import torch  # imported already where there is a platform; commands without one start faster

    return str(platform.compute_dtype(getattr(torch, model.dtype))).removeprefix("torch.")
