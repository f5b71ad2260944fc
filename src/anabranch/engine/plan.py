"""Does it fit? Weights by kind, KV bytes and what a given memory holds: arithmetic on a ModelConfig.

The same code answers `anabranch plan` and sizes the KV pool. No torch, no device, no weights: it starts at once.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

from anabranch import formats
from anabranch.formats import BF16_SOURCE, ITEM_BYTES, Shape, rounded
from anabranch.layers.cache import CacheGroup
from anabranch.models.config import ModelConfig

if TYPE_CHECKING:
    from anabranch.config import EngineConfig

WeightKind = Literal[
    "attention", "router", "routed experts", "shared experts", "dense feed-forward", "embeddings", "norms"
]
QUANTIZED: tuple[WeightKind, ...] = ("attention", "routed experts", "shared experts", "dense feed-forward")
"""The kinds whose matrices have the model's format; others are plain."""


def weights(config: ModelConfig) -> Iterator[tuple[WeightKind, Shape]]:
    """Every weight of the model: its kind and its logical shape. A tied head is one with the embedding."""
    width = config.hidden_size
    for _ in range(1 if config.tie_embeddings else 2):
        yield "embeddings", (config.vocab_size, width)
    yield "norms", (width,)
    if config.draft_layer is not None:
        yield "dense feed-forward", (width, 2 * width)
        yield "norms", (3 * width,)
    for layer in config.all_layers:
        yield from (("attention", shape) for shape in layer.mixer.weight_shapes(width))
        yield "norms", (layer.num_norms * width + layer.output_scale,)
        if layer.mlp_width:
            yield from (("dense feed-forward", shape) for shape in _feed_forward(layer.mlp_width, width))
            if config.mlp_bias:
                yield "dense feed-forward", (2 * layer.mlp_width + width,)
        if (moe := layer.moe) is not None:
            yield "router", (moe.num_experts, width)
            if moe.router_scales:
                yield "router", (moe.num_experts + width,)
            if moe.selection_bias:
                yield "router", (moe.num_experts,)
            if moe.bias:
                yield "router", (moe.num_experts,)
                yield "routed experts", (moe.num_experts * (2 * moe.width + width),)
            yield from (("routed experts", (moe.num_experts, *shape)) for shape in _feed_forward(moe.width, width))
            if moe.shared_width:
                yield from (("shared experts", shape) for shape in _feed_forward(moe.shared_width, width))
            if moe.shared_gate:
                yield "shared experts", (1, width)


def _feed_forward(inner: int, width: int) -> tuple[Shape, Shape]:
    return (2 * inner, width), (width, inner)


def count_weights(config: ModelConfig) -> dict[WeightKind, int]:
    """Parameters by kind."""
    count: dict[WeightKind, int] = dict.fromkeys(get_args(WeightKind), 0)
    for kind, shape in weights(config):
        count[kind] += math.prod(shape)
    return count


def quantized_kinds(config: ModelConfig) -> tuple[WeightKind, ...]:
    """Some checkpoints have quantised experts alone."""
    if config.sources == (BF16_SOURCE,):
        dense: tuple[WeightKind, ...] = ("embeddings", "attention", "shared experts", "dense feed-forward")
        return (*dense, "routed experts") if config.activation == "silu" else dense
    return QUANTIZED if config.sources and config.sources[0].names("layer.weight") else ("routed experts",)


def weight_bytes(
    config: ModelConfig, dtype: str, shapes: Iterable[tuple[WeightKind, Shape]] = ()
) -> dict[WeightKind, int]:
    """Memory of the weights by kind, in the model's format; of those `shapes`, if they are given."""
    format, kinds = config.sources[0].format() if config.sources else formats.PLAIN, quantized_kinds(config)
    total: dict[WeightKind, int] = dict.fromkeys(get_args(WeightKind), 0)
    for kind, shape in shapes or weights(config):
        quantized = kind in kinds and len(shape) > 1
        try:
            total[kind] += (format if quantized else formats.PLAIN).num_bytes(shape, dtype)
        except ValueError:  # a shape that the format cannot have stays plain
            total[kind] += formats.PLAIN.num_bytes(shape, dtype)
    return total


def rank_bytes(config: ModelConfig, dtype: str, num_ranks: int, expert_share: float) -> int:
    """Memory of one rank's weights, which has `expert_share` of the routed experts. `config` is a rank's own, which has
    its attention heads alone; every rank has all routers and norms."""
    total = weight_bytes(config, dtype)
    experts = total.pop("routed experts")
    whole: tuple[WeightKind, ...] = ("embeddings",) if config.vocab_size % num_ranks else ()
    own = sum(total.pop(kind) for kind in ("attention", "router", "norms", *whole))
    return own + sum(total.values()) // num_ranks + int(experts * expert_share)


def quantized(config: ModelConfig, quantization: str) -> ModelConfig:
    """The model as --quantization loads it, for these plans."""
    if config.sources or quantization not in rounded.FORMATS:
        return config
    return replace(config, sources=(rounded.Rounded(rounded.FORMATS[quantization]),))


def kept(config: ModelConfig) -> ModelConfig:
    """The model with its matrices in bf16, as it is loaded where kernels multiply by them in fp32, for these plans."""
    return replace(config, sources=(BF16_SOURCE,)) if config.dtype == "bfloat16" and not config.sources else config


def count_active(config: ModelConfig) -> int:
    """Parameters one token passes through: all of them but the experts it does not visit and the embedding table."""
    total = sum(count_weights(config).values())
    idle = sum(
        (layer.moe.num_experts - layer.moe.top_k)
        * (3 * config.hidden_size * layer.moe.width + layer.moe.bias * (config.hidden_size + 2 * layer.moe.width))
        for layer in config.all_layers
        if layer.moe is not None
    )
    embedding_table = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    return total - idle - embedding_table


def page_bytes(group: CacheGroup, page_size: int, dtype: str) -> int:
    """One page of every layer in the group, in the model's dtype unless it has its own."""
    return group.num_values * (page_size if group.policy.per_token else 1) * ITEM_BYTES[group.spec.dtype or dtype]


def held_pages(config: ModelConfig, context: int, page_size: int) -> list[int]:
    """Pages of each cache group that one request of `context` tokens holds."""
    return [group.policy.held_pages(context, page_size) for group in config.cache_groups]


def pages_for(config: ModelConfig, num_pages: int, context: int, page_size: int, reuse: bool = False) -> list[int]:
    """Pages of each cache group where the largest has `num_pages`: in the proportion that requests of `context` tokens
    hold them. With the prefix cache (`reuse`) as many states again, for checkpoints."""
    held = held_pages(config, context, page_size)
    return [
        max(2, num_pages * pages // max(held)) * (2 if reuse and not group.policy.per_token else 1)
        for pages, group in zip(held, config.cache_groups)
    ]


def pages_bytes(config: ModelConfig, num_pages: Sequence[int], page_size: int, dtype: str) -> int:
    """All pages of all cache groups."""
    return sum(n * page_bytes(group, page_size, dtype) for n, group in zip(num_pages, config.cache_groups, strict=True))


def request_bytes(config: ModelConfig, context: int, page_size: int, dtype: str) -> int:
    """Cache bytes of one request of that many tokens."""
    return pages_bytes(config, held_pages(config, context, page_size), page_size, dtype)


def workspace_bytes(config: ModelConfig, num_tokens: int, num_requests: int, dtype: str) -> int:
    """Scratch of one step, estimated: the widest layer's activations and the logits in fp32 (twice, to sample). Where
    ranks have tokens of their own, those of all may have experts of this one."""
    width = config.hidden_size
    widest = 0
    for layer in config.layers:
        moe, row = layer.moe, layer.mixer.values_per_row + 3 * layer.mlp_width
        if moe is not None:
            row = max(row, moe.top_k * (3 * moe.width + width) + 3 * moe.shared_width)
        widest = max(widest, row + 4 * width)
    scratch = max(getattr(layer.mixer, "scratch", 0) for layer in config.layers)
    return (num_tokens * widest + scratch) * ITEM_BYTES[dtype] + 2 * num_requests * config.vocab_size * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What a memory of `total` bytes holds."""

    total: int
    usable: int
    """total × fraction."""
    weights: int
    workspace: int
    kv: int
    """What is left for keys and values; negative: the model does not fit."""
    page_size: int
    dtype: str
    config: ModelConfig

    @property
    def fits(self) -> bool:
        return self.kv >= request_bytes(self.config, self.page_size, self.page_size, self.dtype)

    def concurrency(self, context: int) -> int:
        """Requests of `context` tokens that fit at the same time."""
        return max(0, self.kv) // request_bytes(self.config, context, self.page_size, self.dtype)

    def largest_context(self, num_requests: int = 1) -> int:
        """Tokens that each of `num_requests` may have, up to the model's own limit."""
        lengths = range(1, self.config.max_position + 1)
        return bisect_left(lengths, True, key=lambda length: self.concurrency(length) < num_requests)

    def num_pages(self, context: int, num_seqs: int = 0) -> list[int]:
        """Pages of each cache group, in the proportion that requests of `context` tokens hold them. A short request has
        as much state as a long one, and so has a checkpoint: there are states for `num_seqs` of them, as far as two
        thirds of the memory go."""
        kv, groups = max(0, self.kv), self.config.cache_groups
        held = held_pages(self.config, context, self.page_size)
        one = request_bytes(self.config, context, self.page_size, self.dtype)
        state = sum(page_bytes(g, self.page_size, self.dtype) for g in groups if not g.policy.per_token)
        num_states = min(num_seqs, kv * 2 // 3 // state) if state else 0
        if num_states <= kv // one:
            return [kv * pages // one for pages in held]
        rest = kv - num_states * state
        return [rest * n // (one - state) if g.policy.per_token else num_states for g, n in zip(groups, held)]

    def pool_pages(self, options: EngineConfig, advice: str) -> list[int]:
        """Pages of each cache group: what fits, but no more than all sequences at their longest could hold, twice over
        where the prefix cache keeps what they leave. ValueError, ending with the advice, if nothing fits."""
        if not self.fits:
            raise ValueError(
                f"the model does not fit: of {self.usable / 1e9:.2f} GB, {self.weights / 1e9:.2f} GB of weights and "
                f"{self.workspace / 1e9:.2f} GB of workspace leave nothing for KV pages; {advice}"
            )
        most = options.max_num_seqs * (2 if options.prefix_cache else 1)
        longest = held_pages(self.config, options.max_model_len, options.page_size)
        planned = self.num_pages(min(options.max_model_len, 8192), most)
        return [min(pages, most * held) for pages, held in zip(planned, longest, strict=True)]


def plan_memory(
    config: ModelConfig,
    total: int,
    *,
    fraction: float,
    dtype: str,
    page_size: int = 16,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 512,
    captured_tokens: int = 0,
    weights: int | None = None,
) -> MemoryPlan:
    """`captured_tokens`: of the largest step that is captured; graphs have memory of their own. `weights`: their bytes,
    where not all are this rank's, or they are loaded."""
    usable = int(total * fraction)
    weights = sum(weight_bytes(config, dtype).values()) if weights is None else weights
    workspace = workspace_bytes(config, max_num_batched_tokens + captured_tokens, max_num_seqs, dtype)
    return MemoryPlan(
        total=total,
        usable=usable,
        weights=weights,
        workspace=workspace,
        kv=usable - weights - workspace,
        page_size=page_size,
        dtype=dtype,
        config=config,
    )


def check_memory(
    config: ModelConfig,
    options: EngineConfig,
    dtype: str,
    *,
    free: int,
    total: int,
    captured_tokens: int,
    num_ranks: int = 1,
    expert_share: float = 1.0,
    weights: int | None = None,
) -> None:
    """ValueError if weights, workspace and KV pages do not fit into what is free, before any of it is taken. `options`
    are resolved. Where the number of pages is given, they and the weights are all that is certain to be needed.
    `num_ranks`, `expert_share`: as of `rank_bytes`; `weights`: their bytes, where headers have been read."""
    stored = "" if weights is not None else f" in {'bfloat16' if config.sources == (BF16_SOURCE,) else dtype}"
    if weights is None:
        weights = rank_bytes(quantized(config, options.quantization), dtype, num_ranks, expert_share)
    if options.num_pages:
        sizes = options.num_pages, options.max_model_len, options.page_size
        pages = pages_for(config, *sizes, options.prefix_cache)
        kv = pages_bytes(config, pages, options.page_size, dtype)
        workspace, usable = 0, free
    else:
        kv = request_bytes(config, options.page_size, options.page_size, dtype)
        num_tokens = options.max_num_batched_tokens * options.data_parallel_size + captured_tokens
        workspace = workspace_bytes(config, num_tokens, options.max_samples, dtype)
        usable = min(free, int(total * options.memory_fraction))
    needed = weights + workspace + kv
    if needed > usable:
        parts = f"{weights / 1e9:.1f} GB of weights{stored}, {workspace / 1e9:.1f} GB of workspace, "
        parts += f"{kv / 1e9:.1f} GB of KV pages"
        fraction = f"memory_fraction is {options.memory_fraction}"
        raised = "raise memory_fraction, " if needed <= free else ""
        raise ValueError(
            f"the model does not fit: it needs {needed / 1e9:.1f} GB ({parts}) and may use {usable / 1e9:.1f} GB "
            f"({free / 1e9:.1f} of {total / 1e9:.1f} GB are free, {fraction}); {raised}use a smaller model or dtype, "
            "fewer pages, or a machine with more memory: see `anabranch plan`"
        )
