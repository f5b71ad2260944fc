"""The models whose shapes ops are timed with, and what was aimed at and measured elsewhere for them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Heads:
    """One kind of attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    name: str
    width: int
    heads: tuple[Heads, ...]
    vocabulary: int
    num_experts: int
    inner: int
    top_k: int
    activation: str = "silu"
    renormalize: bool = True
    experts_target: dict[int, float] = field(default_factory=dict)
    """µs of the op `experts` per number of tokens to be reached on an H200 in bf16."""
    experts_vllm: dict[int, float] = field(default_factory=dict)
    """The same of vLLM 0.25.1's Triton path, measured there the same way."""


def _by_tokens(*values: float) -> dict[int, float]:
    return dict(zip((1, 2, 4, 8, 16, 32, 64, 256, 1024, 2048, 4096, 8192, 16384), values))


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-30b-a3b",
            width=2048,
            heads=(Heads(32, 4, 128),),
            vocabulary=151_936,
            num_experts=128,
            inner=768,
            top_k=8,
            experts_target=_by_tokens(21, 38, 69, 120, 188, 260, 286, 303, 335, 395, 620, 1090, 2090),
            experts_vllm=_by_tokens(29.1, 47.8, 78.8, 135.5, 201.5, 271.6, 299.6, 329, 391, 496, 810, 1539, 2908),
        ),
        ModelShape(
            name="gemma-4-26b-a4b",
            width=2816,
            heads=(Heads(16, 8, 256, window=1024), Heads(16, 2, 512)),
            vocabulary=262_144,
            num_experts=128,
            inner=704,
            top_k=8,
            activation="gelu_tanh",
            experts_target=_by_tokens(27, 50, 92, 155, 240, 320, 366, 385, 430, 500, 790, 1400, 2680),
            experts_vllm=_by_tokens(36.9, 59.8, 106.8, 166, 251, 328, 380, 407, 501, 646, 1142, 2079, 3877),
        ),
        ModelShape(
            name="qwen1.5-moe-a2.7b",
            width=2048,
            heads=(Heads(16, 16, 128),),
            vocabulary=151_936,
            num_experts=60,
            inner=1408,
            top_k=4,
            renormalize=False,
            experts_target=_by_tokens(22, 38, 68, 118, 176, 230, 256, 268, 300, 390, 590, 1020, 1950),
            experts_vllm=_by_tokens(29.8, 45.0, 84.6, 129, 187, 237, 267, 284, 331, 484, 773, 1460, 2727),
        ),
    )
}
TINY = ModelShape(
    name="tiny",
    width=64,
    heads=(Heads(4, 2, 16),),
    vocabulary=1000,
    num_experts=8,
    inner=32,
    top_k=2,
)
"""For machines without an accelerator: shows that everything runs, and what a call costs there."""
