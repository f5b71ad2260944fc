"""What a decode step must read, in bytes, by kind of work: the floor under its time. Arithmetic on a ModelConfig.

Weights once (of routed experts those that a batch is expected to visit, routing being uniform), keys and values of
every token of every request. Activations are left out: in decode they are small and mostly in a cache.
"""

from __future__ import annotations

from anabranch.engine.plan import DTYPE_BYTES
from anabranch.models.config import ModelConfig


def step_bytes(config: ModelConfig, batch: int, context: int, dtype: str) -> dict[str, int]:
    """Bytes by group, as `bench step` groups kernels."""
    size, width = DTYPE_BYTES[dtype], config.hidden_size
    elements = {"dense": config.vocab_size * width, "experts": 0.0, "routing": 0, "attention": 0}
    for layer in config.layers:
        attention = layer.attention
        q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        values = 1 if attention.value_is_key else 2
        elements["dense"] += width * (q + values * kv) + q * width + 3 * width * layer.mlp_width
        seen = min(context, attention.window) if attention.window else context
        elements["attention"] += batch * seen * 2 * kv
        if layer.moe is not None:
            moe = layer.moe
            elements["routing"] += moe.num_experts * width
            elements["dense"] += 3 * width * moe.shared_width
            elements["experts"] += visited(moe.num_experts, moe.top_k, batch) * 3 * width * moe.width
    return {group: int(count * size) for group, count in elements.items() if count}


def visited(num_experts: int, top_k: int, batch: int) -> float:
    """Experts that at least one of `batch` tokens is expected to choose."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)
