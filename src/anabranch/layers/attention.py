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

    def forward(self, x_TW: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], step: Step, kv: KV) -> torch.Tensor:
        q_THD, k_TGD, v_TGD = self._project(x_TW, *rope)
        k_pages, v_pages = kv
        ops.kv_store(k_TGD, v_TGD, k_pages, v_pages, step.slots[self.kv_group])
        out_THD = ops.attention(
            q_THD,
            k_pages,
            v_pages,
            step.page_tables[self.kv_group],
            step.query_start_R,
            step.context_len_R,
            self.config.scale,
            self.config.window,
            step.max_query,
        )
        return self.o_proj(out_THD.flatten(1))

    def _project(
        self, x_TW: torch.Tensor, cos_TF: torch.Tensor, sin_TF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self.config
        heads = self.qkv_proj(x_TW).unflatten(-1, (-1, config.head_dim))
        q, k = heads[:, : config.num_heads], heads[:, config.num_heads :][:, : config.num_kv_heads]
        v = k if config.value_is_key else heads[:, config.num_heads + config.num_kv_heads :]
        if config.v_norm:
            v = ops.rms_norm(v, None, self.eps)
        q_weight = k_weight = None
        if config.qk_norm != "none":
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        if config.clip:
            # The clamp stands between norm and rope, so they cannot be one op here.
            q, k = (norm(x.flatten(1)).view_as(x) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
            q, k, v = (x.clamp(-config.clip, config.clip) for x in (q, k, v))
            q_weight = k_weight = None
        q, k = ops.qk_norm_rope(q, k, cos_TF, sin_TF, q_weight, k_weight, self.eps)
        return q, k, v
