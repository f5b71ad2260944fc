"""What `anabranch bench ops` times: one small function for each op, yielding calls and what they must read and compute.

T tokens, R requests, D hidden width or head dim, H query heads, G key-value heads, V vocabulary, P pages, S slots.

An op is called as the engine calls it, `ops.NAME(...)`, so whatever kernel is bound is what is timed. To add one: a
function here under `@cases("NAME")`. The experts and what belongs to them stand in op_cases_moe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from anabranch import ops
from anabranch.bench.op_shapes import Heads, ModelShape
from anabranch.platforms import Platform

COLD_BYTES = 256 << 20
"""Weights that calls use in turn are together at least so large: no cache holds them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the user chose."""

    platform: Platform
    models: tuple[ModelShape, ...]
    dtype: torch.dtype
    tokens: tuple[int, ...] = ()
    """() : each op's own list."""
    zipf: bool = False
    combines: tuple[str, ...] = ("auto",)

    @property
    def small(self) -> bool:
        """No accelerator: few and small sizes."""
        return self.platform.device.type == "cpu"

    def sizes(self, *usual: int) -> tuple[int, ...]:
        return self.tokens or (tuple(size for size in usual if size <= 64) if self.small else usual)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        drawn = torch.float32 if self.small else dtype or self.dtype
        return torch.empty(shape, dtype=drawn, device=self.platform.device).normal_().to(dtype or self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table."""

    model: str
    size: int
    """Tokens, requests or whatever the op grows with."""
    label: str
    """What sets it apart beside model and size."""
    calls: Sequence[Callable[[], Any]]
    """Made in turn."""
    num_bytes: float
    """That a call must read and write at least."""
    flops: float = 0.0
    expected: Callable[[], Any] | None = None
    """What the first call should give; None: not judged here."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further columns: target_us, vllm_us."""
    also: dict[str, Sequence[Callable[[], Any]]] = field(default_factory=dict)
    """Other ways to do the same, for a ratio."""


CASES: dict[str, Callable[[Setting], Iterator[Case]]] = {}


def cases(op: str) -> Callable[[Callable[[Setting], Iterator[Case]]], Callable[[Setting], Iterator[Case]]]:
    def register(function: Callable[[Setting], Iterator[Case]]) -> Callable[[Setting], Iterator[Case]]:
        assert op in ops.OPS and op not in CASES, op
        CASES[op] = function
        return function

    return register


def num_sets(num_bytes: int) -> int:
    """Sets of weights of so many bytes that together are cold."""
    return max(2, min(16, -(-COLD_BYTES // num_bytes)))


# ---------------------------------------------------------------------------------------------------------------------
# Dense ops
# ---------------------------------------------------------------------------------------------------------------------


@cases("add_rms_norm")
def add_rms_norm(setting: Setting) -> Iterator[Case]:
    for model in setting.models:
        weight_D = setting.normal(model.width)
        for tokens in setting.sizes(1, 16, 64, 256, 1024, 8192):
            inputs = [(setting.normal(tokens, model.width), setting.normal(tokens, model.width)) for _ in range(4)]
            yield Case(
                model.name,
                tokens,
                f"D {model.width}",
                [partial(ops.add_rms_norm, *pair, weight_D, 1e-6) for pair in inputs],
                num_bytes=4 * tokens * model.width * setting.dtype.itemsize,
                expected=partial(ops.add_rms_norm.reference, *inputs[0], weight_D, 1e-6),
            )


@cases("linear")
def linear(setting: Setting) -> Iterator[Case]:
    for model in setting.models:
        for name, inputs, outputs, out_dtype in projections(model):
            bytes_of_one = inputs * outputs * setting.dtype.itemsize
            weights = [setting.normal(outputs, inputs) / inputs**0.5 for _ in range(num_sets(bytes_of_one))]
            for tokens in setting.sizes(1, 2, 4, 8, 16, 64, 256):
                x_TD = setting.normal(tokens, inputs)
                size = (out_dtype or setting.dtype).itemsize
                yield Case(
                    model.name,
                    tokens,
                    f"{name} {inputs}→{outputs}",
                    [partial(ops.linear, x_TD, weight_FD, out_dtype=out_dtype) for weight_FD in weights],
                    num_bytes=bytes_of_one + tokens * (inputs * setting.dtype.itemsize + outputs * size),
                    flops=2.0 * tokens * inputs * outputs,
                    expected=partial(ops.linear.reference, x_TD, weights[0], out_dtype=out_dtype),
                )


def projections(model: ModelShape) -> Iterator[tuple[str, int, int, torch.dtype | None]]:
    """(name, inputs, outputs, dtype of the result) of a model's dense products."""
    for heads in model.heads:
        q, kv = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        yield "qkv", model.width, q + 2 * kv, None
        yield "o", q, model.width, None
    yield "router", model.width, model.num_experts, torch.float32
    yield "lm_head", model.width, model.vocabulary, None


@cases("gated_activation")
def gated_activation(setting: Setting) -> Iterator[Case]:
    for model in setting.models:
        for tokens in setting.sizes(1, 64, 1024, 8192):
            inputs = [setting.normal(tokens, 2 * model.inner) for _ in range(4)]
            yield Case(
                model.name,
                tokens,
                f"I {model.inner}",
                [partial(ops.gated_activation, x, model.activation) for x in inputs],
                num_bytes=3 * tokens * model.inner * setting.dtype.itemsize,
                expected=partial(ops.gated_activation.reference, inputs[0], model.activation),
            )


@cases("sample")
def sample(setting: Setting) -> Iterator[Case]:
    device = setting.platform.device
    for model in setting.models:
        for rows in setting.sizes(1, 16, 64, 256):
            logits = [3 * setting.normal(rows, model.vocabulary, dtype=torch.float32) for _ in range(2)]
            seed_R, position_R = torch.arange(rows, device=device), torch.full((rows,), 7, device=device)
            for label, temperature, top_k, top_p in (
                ("greedy", 0.0, 0, 1.0),
                ("plain", 1.0, 0, 1.0),
                ("top_k 50, top_p 0.9", 0.8, 50, 0.9),
            ):
                rest = (
                    torch.full((rows,), temperature, device=device),
                    torch.full((rows,), top_k, dtype=torch.int32, device=device),
                    torch.full((rows,), top_p, device=device),
                    torch.zeros(rows, device=device),
                    seed_R,
                    position_R,
                )
                yield Case(
                    model.name,
                    rows,
                    label,
                    [partial(ops.sample, logits_RV, *rest) for logits_RV in logits],
                    num_bytes=4.0 * rows * model.vocabulary,
                    expected=partial(ops.sample.reference, logits[0], *rest) if temperature == 0 else None,
                )


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


@cases("attention")
def attention(setting: Setting) -> Iterator[Case]:
    """Decode: every request has one query; prefill: one request with all of its tokens new."""
    decode = (
        ((1, 40), (4, 100)) if setting.small else tuple((r, c) for r in (1, 16, 64, 256) for c in (128, 1024, 8192))
    )
    for model in setting.models:
        for heads in model.heads:
            for requests, context in decode:
                if not setting.tokens or requests in setting.tokens:
                    yield attention_case(setting, model.name, heads, requests, 1, context)
            for tokens in setting.sizes(64, 128, 1024, 4096, 8192):
                yield attention_case(setting, model.name, heads, 1, tokens, tokens)


def attention_case(
    setting: Setting, model: str, heads: Heads, requests: int, queries: int, context: int, page_size: int = 16
) -> Case:
    device, item = setting.platform.device, setting.dtype.itemsize
    pages_each = -(-context // page_size)
    seen = min(context, heads.window) if heads.window else context
    per_layer = 2 * requests * pages_each * page_size * heads.num_kv_heads * heads.head_dim * item
    table_RM = torch.randperm(requests * pages_each, device=device).int().view(requests, pages_each)
    start_R = torch.arange(requests + 1, dtype=torch.int32, device=device) * queries
    length_R = torch.full((requests,), context, dtype=torch.int32, device=device)
    rest: Any = (table_RM, start_R, length_R, heads.head_dim**-0.5, heads.window, queries)
    inputs = []
    for _ in range(min(4, num_sets(per_layer))):
        kv = setting.normal(2, requests * pages_each, page_size, heads.num_kv_heads, heads.head_dim)
        inputs.append((setting.normal(requests * queries, heads.num_heads, heads.head_dim), kv[0], kv[1]))
    # Of a causal square half is seen; behind a window no more than the window.
    pairs = requests * (context * (context + 1) / 2 - (context - seen) * (context - seen + 1) / 2)
    if queries == 1:
        pairs = requests * seen
    window = f", window {heads.window}" if heads.window else ""
    kind = f"decode, context {context}" if queries == 1 else "prefill"
    keys = requests * (seen if queries == 1 else context)
    return Case(
        model,
        requests * queries,
        f"{kind}, H {heads.num_heads} G {heads.num_kv_heads} D {heads.head_dim}{window}",
        [partial(ops.attention, *given, *rest) for given in inputs],
        num_bytes=item * heads.head_dim * (2 * keys * heads.num_kv_heads + 2 * requests * queries * heads.num_heads),
        flops=4.0 * pairs * heads.num_heads * heads.head_dim,
        # The reference holds all scores in fp32.
        expected=partial(ops.attention.reference, *inputs[0], *rest) if queries * context <= 1 << 21 else None,
    )


@cases("rope_store")
def rope_store(setting: Setting) -> Iterator[Case]:
    device = setting.platform.device
    for model in setting.models:
        for heads in model.heads:
            H, G, D = heads.num_heads, heads.num_kv_heads, heads.head_dim
            norm_D = setting.normal(D)
            for tokens in setting.sizes(1, 16, 64, 256, 1024, 8192):
                angle_TF = torch.rand(tokens, D // 2, device=device)
                num_pages = -(-tokens // 16)
                pages = setting.normal(2, num_pages, 16, G, D)
                slot_T = torch.randperm(num_pages * 16, device=device)[:tokens]
                packed = [setting.normal(tokens, H + 2 * G, D) for _ in range(4)]
                rest: Any = (angle_TF.cos(), angle_TF.sin(), norm_D, norm_D, False, 1e-6, pages[0], pages[1], slot_T)
                given: list[Any] = [(*qkv.split([H, G, G], dim=1), *rest) for qkv in packed]
                yield Case(
                    model.name,
                    tokens,
                    f"H {H} G {G} D {D}",
                    [partial(ops.rope_store, *one) for one in given],
                    num_bytes=2.0 * tokens * (H + 2 * G) * D * setting.dtype.itemsize + 4 * tokens * D,
                    expected=partial(ops.rope_store.reference, *given[0]),
                )
