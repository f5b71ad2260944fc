"""Latent attention (MLA) over the paged cache: a row of each token, of which all heads make their keys and values.

T tokens, H heads, W hidden width, C numbers kept of a token, L of them latent, N plain dims and D dims of a query
head, V of a value head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.config import EXPANDED_ROWS
from anabranch.layers.linear import Linear, PackedLinear, WeightAlone
from anabranch.layers.mixer import Cache, Rope
from anabranch.layers.norm import RMSNorm
from anabranch.layers.step import Span, Step
from anabranch.ops.weight import Shard
from anabranch.parallel.group import ALONE, Group

if TYPE_CHECKING:
    from anabranch.layers.config import LatentConfig

EPS = 1e-6
"""Of the norms in here, whatever the model's is."""
MOST_TOGETHER = 16
"""Requests that are expanded together: attention of up to 31 is one version of its kernel."""


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
        # Makes plain keys and values of all heads from a latent row. Its two parts are multiplied by queries and by
        # results, head by head, so it is never kept quantised.
        self.kv_b_proj = WeightAlone((heads * (config.plain_dim + config.value_dim), config.latent_dim), divided)
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
        table_RM = step.page_tables[self.cache_group]
        long = [span for span in step.spans if span.end - span.begin > self.config.most_absorbed]
        if not long:
            return self._absorbed(written, step, table_RM, cache)
        mixed_THV = written.new_empty(*written.shape[:2], self.config.value_dim)
        # Long requests come last; one that does not is computed twice.
        num_rows, num_requests = written.shape[0], table_RM.shape[0]
        for span in reversed(long):
            if span.request + 1 == num_requests:
                num_rows, num_requests = span.begin, span.request
        if num_requests:
            max_query = max((s.end - s.begin for s in step.spans if s.request < num_requests), default=1)
            starts, lengths = step.query_start_R[: num_requests + 1], step.context_len_R[:num_requests]
            others = replace(step, query_start_R=starts, context_len_R=lengths, max_query=max_query)
            mixed_THV[:num_rows] = self._absorbed(written[:num_rows], others, table_RM[:num_requests], cache)
        # With keys as wide as values, attention of several requests would look for rows of a decode step too.
        most = MOST_TOGETHER if self.config.key_dim != self.config.value_dim else 1
        for spans in consecutive(long, cache[0].shape[1], most):
            begin, end = spans[0].begin, spans[-1].end
            made = self._expanded(written[begin:end], spans, table_RM, cache)
            if end - begin == written.shape[0]:
                return made
            mixed_THV[begin:end] = made
        return mixed_THV

    def _absorbed(self, q_THD: torch.Tensor, step: Step, table_RM: torch.Tensor, cache: Cache) -> torch.Tensor:
        """By queries in the latent space, and results from there."""
        config = self.config
        weight_HXL = self.kv_b_proj.weight.dense().unflatten(0, (config.num_heads, -1))
        key_HNL, value_HVL = weight_HXL.split([config.plain_dim, config.value_dim], 1)
        plain_THN, turned_THF = q_THD.tensor_split([config.plain_dim], -1)
        requests = table_RM, step.query_start_R, step.context_len_R
        q_THL = ops.linear_heads(plain_THN, key_HNL)
        call = ops.LatentAttentionCall(q_THL, turned_THF, cache[0], *requests, config.scale, step.max_query)
        return ops.linear_heads(ops.latent_attention(call), value_HVL.mT)

    def _expanded(
        self, q_THD: torch.Tensor, spans: tuple[Span, ...], table_RM: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Of some requests, by keys and values of their tokens, of as many heads at once as there is memory for."""
        config, weight, (_, H, D), S = self.config, self.kv_b_proj.weight.dense(), q_THD.shape, cache[0].shape[1]
        lengths = tuple((span.end - span.begin, span.context) for span in spans)
        requests = pages_in_order(lengths, S, q_THD.device)
        page_P = torch.cat([table_RM[span.request, : -(-span.context // S)] for span in spans])
        weight_HXC = with_turned(weight.unflatten(0, (H, -1)), config.plain_dim, D - config.plain_dim)
        num_pages, max_query = page_P.shape[0], max(num_queries for num_queries, _ in lengths)
        at_once = max(1, min(H, H * EXPANDED_ROWS // (num_pages * S)))
        mixed = []
        for q, weight_hXC in zip(q_THD.split(at_once, 1), weight_HXC.split(at_once), strict=True):
            kv_PSHX = q.new_empty(num_pages, S, *weight_hXC.shape[:2])
            for first in range(0, num_pages, some := max(1, EXPANDED_ROWS // S)):
                row_PSC = cache[0].index_select(0, page_P[first : first + some])
                kv_QX = kv_PSHX[first : first + some].view(-1, weight_hXC.shape[:2].numel())
                torch.mm(row_PSC.flatten(0, 1), weight_hXC.flatten(0, 1).T, out=kv_QX)
            k_PSHD, v_PSHV = kv_PSHX.tensor_split([D], -1)
            call = ops.AttentionCall(q, k_PSHD, v_PSHV, *requests, config.scale, max_query=max_query)
            mixed.append(ops.attention(call))
            del kv_PSHX, kv_QX, k_PSHD, v_PSHV, call, row_PSC  # before the next are made
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.o_proj(mixed.flatten(1)))


def consecutive(spans: list[Span], page_size: int, most: int) -> Iterator[tuple[Span, ...]]:
    """Spans whose rows follow each other, at most so many, of no more tokens than are expanded at once, or one."""
    some: list[Span] = []
    for span in spans:
        num_tokens = sum(-(-one.context // page_size) * page_size for one in (*some, span))
        if some and (span.begin != some[-1].end or num_tokens > EXPANDED_ROWS or len(some) == most):
            yield tuple(some)
            some = []
        some.append(span)
    yield tuple(some)


def with_turned(weight_HXL: torch.Tensor, plain: int, turned: int) -> torch.Tensor:
    """The matrix that makes whole keys and values of a row, [H, plain + turned + value dims, C]: dims that have turned
    are copied, by ones. A product of a few more columns takes less time than putting three results together."""
    H, X, L = weight_HXL.shape
    made_HXC = weight_HXL.new_zeros(H, X + turned, L + turned)
    made_HXC[:, :plain, :L] = weight_HXL[:, :plain]
    made_HXC[:, plain : plain + turned, L:].diagonal(dim1=1, dim2=2).fill_(1)
    made_HXC[:, plain + turned :, :L] = weight_HXL[:, plain:]
    return made_HXC


@functools.lru_cache(64)
def pages_in_order(
    lengths: tuple[tuple[int, int], ...], page_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """page_table_RM, query_start_R and context_len_R, for all layers of a step: of requests with so many queries and
    tokens each, whose pages lie one after another."""
    counts = [-(-context // page_size) for _, context in lengths]
    firsts = [sum(counts[:r]) for r in range(len(counts))]
    starts = [sum(num_queries for num_queries, _ in lengths[:r]) for r in range(len(lengths) + 1)]
    table_RM = torch.tensor(firsts)[:, None] + torch.arange(max(counts))
    table_RM.clamp_(max=sum(counts) - 1)  # what lies beyond a request's pages is not read
    made = table_RM, torch.tensor(starts), torch.tensor([context for _, context in lengths])
    table_RM, start_R, context_R = (tensor.to(torch.int32).to(device, non_blocking=True) for tensor in made)
    return table_RM, start_R, context_R
