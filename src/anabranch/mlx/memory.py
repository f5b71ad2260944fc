"""What fits, in bytes and pages, before and after the weights are there. Ints alone: this file does not import MLX.

Keys and values exist twice. Pages at rest (`pool`) hold what was computed, shared as far as prefixes agree; requests
that decode have a working copy (`kv_cache`), because MLX's attention wants a batch in one piece. Each gets half of what
the weights and one step's scratch leave. The copy pads every row of a batch to its longest: what that takes is counted
here, and rows that do not fit beside each other take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.config import EngineConfig
from anabranch.engine import plan
from anabranch.formats import ITEM_BYTES
from anabranch.models.config import ModelConfig
from anabranch.platforms import Memory

PREFILL_TOKENS = 2048
"""Computed at a time: what one step's scratch is for."""
SPARE_TOKENS = 256
"""By so many mlx_lm lets a cache grow at a time."""


def workspace_bytes(config: EngineConfig, model: ModelConfig, dtype: str) -> int:
    num_tokens = min(config.max_num_batched_tokens, PREFILL_TOKENS)
    return plan.workspace_bytes(model, num_tokens, config.max_num_seqs, dtype)


def guard(config: EngineConfig, model: ModelConfig, dtype: str, weights: int, memory: Memory) -> None:
    """Refuse what would not fit with one request of one page."""
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
    """Pages of each KVGroup: as configured, else half of what is left, but no more than all sequences at their longest
    could hold, twice over where the prefix cache keeps what they leave. The weights are in memory."""
    useful = [plan.pages_needed(group, config.max_model_len, config.page_size) for group in model.kv_groups]
    if config.num_pages:
        return [max(2, config.num_pages * pages // max(useful)) for pages in useful]
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
    if not found.fits:
        raise ValueError(
            f"the model does not fit: of {usable / 1e9:.2f} GB, {weights / 1e9:.2f} GB of weights and"
            f" {workspace / 1e9:.2f} GB of workspace leave nothing for KV pages; raise memory_fraction or quantise it"
        )
    most = config.max_num_seqs * (2 if config.prefix_cache else 1)
    planned = found.num_pages(min(config.max_model_len, 8192))
    return [min(pages, most * needed) for pages, needed in zip(planned, useful, strict=True)]


def pool_bytes(config: EngineConfig, model: ModelConfig, dtype: str, num_pages: Sequence[int]) -> int:
    return sum(
        pages * plan.page_bytes(group, config.page_size, dtype)
        for group, pages in zip(model.kv_groups, num_pages, strict=True)
    )


def working_bytes(model: ModelConfig, dtype: str, lengths: Sequence[int]) -> int:
    """Keys and values of a batch with rows of so many tokens: all as long as the longest, or the window."""
    longest = max(lengths)
    values = sum(
        group.values_per_token * (min(longest, group.window or longest) + SPARE_TOKENS) for group in model.kv_groups
    )
    return len(lengths) * values * ITEM_BYTES[dtype]
