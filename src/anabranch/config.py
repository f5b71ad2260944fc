"""How the engine runs: one small frozen dataclass. `resolve` turns every "auto" into a value, once, and logs it.

The model's own shape is models.config.ModelConfig; this is what the user decides.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anabranch.models.config import ModelConfig
    from anabranch.platforms import Platform

log = logging.getLogger(__name__)

AUTO = 0  # of a number: to be resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str
    dtype: str = "auto"
    load_format: str = "safetensors"
    max_model_len: int = AUTO
    """Tokens a request may have, prompt and answer together. Auto: the model's limit, as far as the KV pool allows."""
    max_num_seqs: int = 256
    """Requests that run at the same time."""
    max_num_batched_tokens: int = 8192
    """Tokens computed in one step."""
    page_size: int = AUTO
    num_pages: int = AUTO
    """KV pages of the pool (of the largest group). Auto: what memory_fraction leaves after weights and workspace."""
    memory_fraction: float = 0.0
    prefix_cache: bool = True
    async_scheduling: bool = True
    """Launch the next step before the last one's tokens are read."""
    expert_load_interval: int = 16
    """Steps between two copies of the expert histogram to the host; 0: no histogram."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (
            ("max_model_len", 0),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("page_size", 0),
            ("num_pages", 0),
            ("expert_load_interval", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ValueError(f"{name} must be an integer of at least {low}, not {value!r}")
        if not 0 <= self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction must lie in (0, 1], not {self.memory_fraction!r}")


def resolve(config: EngineConfig, model: ModelConfig, platform: Platform) -> EngineConfig:
    """Every auto that needs only model and platform; the pool's size needs memory and is filled in by the runner."""
    chosen: dict[str, object] = {}
    if config.page_size == AUTO:
        chosen["page_size"] = platform.page_size
    if config.memory_fraction == 0.0:
        chosen["memory_fraction"] = platform.memory_fraction
    if config.max_model_len == AUTO:
        chosen["max_model_len"] = model.max_position
    elif config.max_model_len > model.max_position:
        raise ValueError(
            f"max_model_len {config.max_model_len} is more than the model's own limit of {model.max_position} tokens"
        )
    for name, value in chosen.items():
        log.info("%s: auto → %s", name, value)
    return replace(config, **chosen)  # type: ignore[arg-type]
