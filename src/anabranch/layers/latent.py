"""Latent attention (MLA) over the paged cache: a row of each token, of which all heads make their keys and values.

T tokens, H heads, W hidden width, C numbers kept of a token, L of them latent, N plain dims and D dims of a query
head, V of a value head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Linear, PackedLinear
from anabranch.layers.mixer import Cache, Rope
from anabranch.layers.norm import RMSNorm
from anabranch.layers.step import Step
from anabranch.ops.weight import Shard, Weight
from anabranch.parallel.group import ALONE, Group

if TYPE_CHECKING:
    from anabranch.layers.config import LatentConfig

EPS = 1e-6
"""Of the norms in here, whatever the model's is."""


class LatentAttention(nn.Module):
    """A Mixer whose cache is pages of rows, [P, S, C]."""

    def __init__(self, config: LatentConfig, width: int, eps: float, cache_group: int, group: Group = ALONE) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.cache_group = cache_group
        self.written_shape = config.num_heads, config.key_dim
        self.mixed_shape = config.num_heads, config.value_dim
        rank, ranks = config.rank, config.num_ranks
        heads = config.num_heads * ranks
        divided, q = Shard(0, rank, ranks), heads * config.key_dim
        parts, sections = {"q_a_proj": config.query_rank}, ((config.query_rank, 1), (config.row, 1))
        if not config.query_rank:
            parts, sections = {"q_proj": q}, ((q, ranks), (config.row, 1))
        parts |= {"kv_a_proj_with_mqa": config.row}
        self.qkv_a_proj = PackedLinear(width, parts, config.bias, Shard(0, rank, ranks, sections))
        self.q_a_layernorm = RMSNorm(config.query_rank, EPS) if config.query_rank else None
        self.q_b_proj = Linear(config.query_rank, q, shard=divided) if config.query_rank else None
        self.kv_a_layernorm = RMSNorm(config.latent_dim, EPS)
        self.kv_b_proj = Expansion(heads * (config.plain_dim + config.value_dim), config.latent_dim, divided)
        self.o_proj = Linear(heads * config.value_dim, width, config.bias, Shard(1, rank, ranks))

    def project(self, x_TW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, and what is kept of each token before its norm."""
        q_T, row_TC = self.qkv_a_proj(x_TW).tensor_split([-self.config.row], 1)
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            q_T = self.q_b_proj(self.q_a_layernorm(q_T))
        return q_T.unflatten(-1, (-1, self.config.key_dim)), row_TC

    def write(self, projected: tuple[torch.Tensor, ...], rope: Rope, step: Step, cache: Cache) -> torch.Tensor:
        """Returns the queries."""
        (q_THD, row_TC), (cos_TF, sin_TF), norm = projected, rope, self.kv_a_layernorm
        slot_T, interleaved = step.slots[self.cache_group], self.config.interleaved
        return ops.latent_store(
            ops.LatentStoreCall(q_THD, row_TC, norm.weight, norm.eps, cos_TF, sin_TF, interleaved, cache[0], slot_T)
        )

    def mix(self, written: torch.Tensor, step: Step, cache: Cache) -> torch.Tensor:
        config = self.config
        weight_HXL = self.kv_b_proj.weight.dense().unflatten(0, (config.num_heads, -1))
        key_HNL, value_HVL = weight_HXL.split([config.plain_dim, config.value_dim], 1)
        plain_THN, turned_THF = written.tensor_split([config.plain_dim], -1)
        call = ops.LatentAttentionCall(
            ops.linear_heads(plain_THN, key_HNL),
            turned_THF,
            cache[0],
            step.page_tables[self.cache_group],
            step.query_start_R,
            step.context_len_R,
            config.scale,
            step.max_query,
        )
        return ops.linear_heads(ops.latent_attention(call), value_HVL.mT)

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.o_proj(mixed.flatten(1)))


class Expansion(nn.Module):
    """The matrix that makes plain keys and values of all heads from a latent row. Its two parts are multiplied by
    queries and by results, head by head, so it is never kept quantised."""

    def __init__(self, outputs: int, inputs: int, shard: Shard) -> None:
        super().__init__()
        self.weight = Weight((outputs, inputs), shard=shard)
