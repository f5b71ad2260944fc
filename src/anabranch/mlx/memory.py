"""What fits, in bytes and pages, before and after the weights are loaded. Ints alone: this file does not import MLX.

Keys and values are kept twice. Pages (`pool`) hold what was computed, shared as far as prefixes agree; requests that
decode have a working copy (`kv_cache`), because MLX's attention needs a batch in one piece. Each gets half of what the
weights and one step's scratch leave. The copy pads every row of a batch to its longest: that is counted here, and rows
that do not fit at the same time take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.config import EngineConfig
from anabranch.engine import plan
from anabranch.formats import ITEM_BYTES
from anabranch.models.config import ModelConfig
from anabranch.platforms import Memory

PREFILL_TOKENS = 2048
"""Prompt tokens that are computed at a time."""
SPARE_TOKENS = 256
"""Tokens by which mlx_lm lets a cache grow at a time."""


def workspace_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    num_tokens = min(config.max_num_batched_tokens, PREFILL_TOKENS)
    return plan.workspace_bytes(model, num_tokens, config.max_num_seqs, dtype)


def guard(config: EngineConfig, model: ModelConfig, dtype: str, weights: int, memory: Memory) -> None:
    """ValueError if the model does not fit with one request of one page."""
    usable = min(int(memory.total * config.memory_fraction), memory.free)
    page = plan.request_bytes(model, config.page_size, config.page_size, dtype)
    needed = weights + workspace_bytes(config, model, dtype) + 2 * page
    if needed > usable:
        raise ValueError(
            f"{config.model}: does not fit: {weights / 1e9:.2f} GB of weights, with workspace {needed / 1e9:.2f} GB,"
            f" and {usable / 1e9:.2f} GB may be used (memory_fraction {config.memory_fraction} of"
            f" {memory.total / 1e9:.2f} GB, {memory.free / 1e9:.2f} GB free now); quantise it (mlx_lm.convert -q),"
            " close other programs, or lower max_num_seqs"
        )


def num_pages(config: EngineConfig, model: ModelConfig, dtype: str, weights: int, memory: Memory) -> list[int]:
    """Pages of each cache group: as configured, else of half of what is left. The weights are in memory."""
    if config.num_pages:
        return plan.pages_for(model, config.num_pages, config.max_model_len, config.page_size)
    usable = int(memory.total * config.memory_fraction)
    workspace = workspace_bytes(config, model, dtype)
    kv = min(usable - weights, memory.free) - workspace - working_bytes(model, dtype, [1])
    found = plan.MemoryPlan(
        total=memory.total,
        usable=usable,
        weights=weights,
        workspace=workspace,
        kv=kv // 2,
        page_size=config.page_size,
        dtype=dtype,
        config=model,
    )
    return found.pool_pages(config, "raise memory_fraction or quantise it")


def working_bytes(model: ModelConfig, dtype: str, lengths: Sequence[int]) -> int:
    """Keys and values of a batch with rows of these lengths: all as long as the longest, or the window."""
    longest = max(lengths)
    values = sum(group.num_values * (group.policy.num_kept(longest) + SPARE_TOKENS) for group in model.cache_groups)
    return len(lengths) * values * ITEM_BYTES[dtype]
