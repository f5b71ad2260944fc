"""Self-attention over the paged cache, for every family: the differences are in AttentionConfig.

T tokens, H query heads, G key-value heads, D head dim, W hidden width, F rotated pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Linear, PackedLinear
from anabranch.layers.norm import RMSNorm
from anabranch.layers.step import Step

if TYPE_CHECKING:
    from anabranch.models.config import AttentionConfig

KV = tuple[torch.Tensor, torch.Tensor]
"""A layer's key pages and value pages, each [P, S, G, D]."""


class Attention(nn.Module):
    def __init__(self, config: AttentionConfig, width: int, eps: float, kv_group: int) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        self.kv_group = kv_group
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q, "k_proj": kv} if config.value_is_key else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = PackedLinear(width, parts, config.qkv_bias)
        self.o_proj = Linear(q, width, config.output_bias)
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(config.head_dim if per_head else q, eps)
            self.k_norm = RMSNorm(config.head_dim if per_head else kv, eps)

    def project(self, x_TW: torch.Tensor) -> torch.Tensor:
        """The heads of queries, keys and (unless they are the keys) values, one behind the other."""
        return self.qkv_proj(x_TW).unflatten(-1, (-1, self.config.head_dim))

    def store(self, heads: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], step: Step, kv: KV) -> torch.Tensor:
        """The queries, ready for `attend`; keys and values go into the pages."""
        config, (k_pages, v_pages), slot_T = self.config, kv, step.slots[self.kv_group]
        q, k = heads[:, : config.num_heads], heads[:, config.num_heads :][:, : config.num_kv_heads]
        v = k if config.value_is_key else heads[:, config.num_heads + config.num_kv_heads :]
        q_weight = k_weight = None
        if config.qk_norm != "none":
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        if config.clip:
            # The clamp stands between norm and rope.
            q, k = (norm(x.flatten(1)).view_as(x) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
            q, k, v = (x.clamp(-config.clip, config.clip) for x in (q, k, v))
            q_weight = k_weight = None
        norms = q_weight, k_weight
        call = ops.RopeStoreCall(q, k, v, *rope, *norms, config.v_norm, self.eps, k_pages, v_pages, slot_T)
        return ops.rope_store(call)

    def attend(self, q_THD: torch.Tensor, step: Step, kv: KV) -> torch.Tensor:
        lengths, config = (step.page_tables[self.kv_group], step.query_start_R, step.context_len_R), self.config
        return ops.attention(ops.AttentionCall(q_THD, *kv, *lengths, config.scale, config.window, step.max_query))

    def output(self, attended_THD: torch.Tensor) -> torch.Tensor:
        return self.o_proj(attended_THD.flatten(1))
