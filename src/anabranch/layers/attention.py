"""Self-attention over the paged cache, for every family: the differences are in AttentionConfig.

T tokens, H query heads, G key-value heads, D head dim, W hidden width, F rotated pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.formats import Grouped
from anabranch.layers.linear import Linear, PackedLinear, Rows
from anabranch.layers.mixer import Cache, Rope
from anabranch.layers.norm import RMSNorm
from anabranch.layers.step import Step
from anabranch.ops.weight import Shard, Weight
from anabranch.parallel.group import ALONE, Group

if TYPE_CHECKING:
    from anabranch.layers.config import AttentionConfig


class Attention(nn.Module):
    """A Mixer whose cache is key pages and value pages, each [P, S, G, D]."""

    def __init__(self, config: AttentionConfig, width: int, eps: float, cache_group: int, group: Group = ALONE) -> None:
        super().__init__()
        self.config = config
        self.group = group
        self.eps = eps
        self.cache_group = cache_group
        self.mixed_shape = config.num_heads, config.head_dim
        self.written_shape = (2 * config.num_heads, config.head_dim) if config.gated else self.mixed_shape
        self.set_cache_scales()
        ranks, shares = config.num_ranks, config.kv_shares
        q, kv = config.num_heads * ranks * config.head_dim, config.num_kv_heads * shares * config.head_dim
        parts = {"q_proj": q, "k_proj": kv} if config.value_is_key else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        sections = ((q, ranks), *[(kv, shares)] * (len(parts) - 1), *([(q, ranks)] if config.gated else []))
        rows, shard = self._gated_rows(q, kv) if config.gated else parts, Shard(0, config.rank, ranks, sections)
        self.qkv_proj = PackedLinear(width, rows, config.qkv_bias, shard)
        self.o_proj = Linear(q, width, config.output_bias, Shard(1, config.rank, ranks))
        self.sinks = Weight((config.num_heads * ranks,), shard=Shard(0, config.rank, ranks)) if config.sinks else None
        if config.qk_norm != "none":
            per_head = config.qk_norm == "head"
            self.q_norm = RMSNorm(config.head_dim if per_head else q, eps)
            self.k_norm = RMSNorm(config.head_dim if per_head else kv, eps)

    def _gated_rows(self, q: int, kv: int) -> list[Rows]:
        """Queries, keys, values, gates, of all ranks."""
        D = self.config.head_dim
        queries, gates = ([("q_proj", (2 * head + gate) * D, D) for head in range(q // D)] for gate in (0, 1))
        return [*queries, ("k_proj", 0, kv), ("v_proj", 0, kv), *gates]

    def part_neighbours(self) -> None:
        """After loading: move every second dimension of queries and keys to the second half of its head, where rope
        expects the partners of the first half. Scores are the same in any order of dimensions."""
        config = self.config
        if not config.neighbours:
            return
        assert config.qk_norm == "none", "a norm's weights would have to be moved too"
        rows = (config.num_heads + config.num_kv_heads) * config.head_dim
        for weight in self.qkv_proj.children():
            assert isinstance(weight, Weight)
            if isinstance(weight.format, Grouped) and weight.format.rows % config.head_dim:
                weight.part_scales()
            for tensor in weight.tensors.values():
                if len(tensor) == weight.shape[0]:  # else whole heads share a scale
                    heads = tensor[:rows].unflatten(0, (-1, config.head_dim // 2, 2))
                    tensor[:rows] = heads.transpose(1, 2).flatten(0, 2)

    def set_cache_scales(self, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
        """Keys and values are these times what an FP8 cache holds."""
        self.k_scale, self.v_scale = k_scale, v_scale
        self.score_scale = self.config.scale * k_scale

    def project(self, x_TW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The heads of queries, keys, (unless they are the keys) values and gates, in one tensor."""
        return (self.qkv_proj(x_TW).unflatten(-1, (-1, self.config.head_dim)),)

    def write(self, projected: tuple[torch.Tensor, ...], rope: Rope, step: Step, cache: Cache) -> torch.Tensor:
        """Returns the queries, and their gates after them; keys and values go into the pages."""
        (heads,), config, (k_pages, v_pages), slot_T = projected, self.config, cache, step.slots[self.cache_group]
        q, k = heads[:, : config.num_heads], heads[:, config.num_heads :][:, : config.num_kv_heads]
        v = k if config.value_is_key else heads[:, config.num_heads + config.num_kv_heads :][:, : config.num_kv_heads]
        q_weight = k_weight = None
        if config.qk_norm != "none":
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        if config.clip or (config.qk_norm == "all" and config.num_ranks > 1):
            q, k = self._norm_all(q, self.q_norm, config.num_ranks), self._norm_all(k, self.k_norm, config.kv_shares)
            q_weight = k_weight = None
        if config.clip:  # it stands between norm and rope
            q, k, v = (x.clamp(-config.clip, config.clip) for x in (q, k, v))
        scales = self.k_scale, self.v_scale
        call = ops.RopeStoreCall(
            q, k, v, rope[0], rope[1], q_weight, k_weight, config.v_norm, self.eps, k_pages, v_pages, slot_T, *scales
        )
        q = ops.rope_store(call)
        return torch.cat([q, heads[:, -config.num_heads :]], 1) if config.gated else q

    def _norm_all(self, x_THD: torch.Tensor, norm: RMSNorm, shares: int) -> torch.Tensor:
        """The norm over the heads of all ranks, of which this one has one of so many shares."""
        x_TF = x_THD.flatten(1)
        if self.config.num_ranks == 1:
            return norm(x_TF).view_as(x_THD)
        width, share = x_TF.shape[1], self.config.rank * shares // self.config.num_ranks
        copies = self.config.num_ranks // shares  # ranks that have the same heads
        mean_T1 = self.group.all_reduce(x_TF.float().square().sum(1, keepdim=True)) / (copies * shares * width)
        weight_F = norm.weight[share * width : (share + 1) * width]
        y_TF = x_TF.float() * torch.rsqrt(mean_T1 + norm.eps) * weight_F.float()
        return y_TF.to(x_TF.dtype).view_as(x_THD)

    def mix(self, written: torch.Tensor, step: Step, cache: Cache) -> torch.Tensor:
        num_heads = self.config.num_heads
        call = ops.AttentionCall(
            written[:, :num_heads] if self.config.gated else written,
            cache[0],
            cache[1],
            step.page_tables[self.cache_group],
            step.query_start_R,
            step.context_len_R,
            self.score_scale,
            self.config.window,
            step.max_query,
            self.v_scale,
            None if self.sinks is None else self.sinks.data,
        )
        mixed_THD = ops.attention(call)
        return ops.multiply_gated(mixed_THD, written[:, num_heads:]) if self.config.gated else mixed_THD

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.o_proj(mixed.flatten(1)))
