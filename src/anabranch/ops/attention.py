"""Causal attention over paged keys and values, for any mix of prefill chunks and decode tokens.

T tokens of all requests one after another, R requests, H query heads, G key-value heads (H divisible by G),
D head dim of queries and keys, E of values, P pages, S slots in a page, M page-table width.
"""

from itertools import accumulate
from typing import NamedTuple

import torch

from anabranch.ops.op import Samples, op
from anabranch.ops.rope_store import as_bytes


class AttentionCall(NamedTuple):
    q_THD: torch.Tensor
    k_PSGD: torch.Tensor
    v_PSGE: torch.Tensor
    """Keys and values of this step's tokens are in the pages already."""
    page_table_RM: torch.Tensor
    """int32."""
    query_start_R: torch.Tensor
    """int32, R + 1 entries: request r has the rows query_start_R[r] .. query_start_R[r + 1]."""
    context_len_R: torch.Tensor
    """int32: tokens of a request; its rows are the last of them."""
    scale: float
    window: int = 0
    """Tokens that a query sees, itself included; 0: all before it."""
    max_query: int = 0
    """At least the most rows of a request (0: not known), so that a kernel can tell a decode step without asking the
    device."""
    v_scale: float = 1.0
    """Values are this times what the pages hold, which may be FP8. The factor of keys is part of `scale`."""
    sink_H: torch.Tensor | None = None
    """A learned score of each head, for a key without a value: it takes a part of every row's weight."""


def draw_table(counts: list[int], num_pages: int, generator: torch.Generator) -> torch.Tensor:
    """A page table of requests that have so many pages each, in any order. Page 0 belongs to no request and holds NaN
    in samples: table entries past a request's pages point there."""
    table = torch.zeros(len(counts), 5, dtype=torch.int32)
    free = (1 + torch.randperm(num_pages - 1, generator=generator)).tolist()
    for r, count in enumerate(counts):
        for j in range(count):
            table[r, j] = free.pop()
    return table


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    # Each request: (tokens in this step, context length after it).
    for label, requests, window, heads, kv_heads, dim in (
        ("one prefill", [(7, 7)], 0, 4, 2, 16),
        ("decode", [(1, 5), (1, 1), (1, 16)], 0, 4, 1, 16),
        ("mixed, chunked", [(3, 9), (1, 12), (6, 6), (1, 4)], 0, 2, 2, 32),
        ("window", [(9, 9), (1, 14), (4, 13)], 3, 4, 2, 8),
        ("window longer than context", [(5, 8), (1, 3)], 64, 2, 1, 8),
        ("padding rows and an empty request", [(2, 6), (0, 0), (1, 1)], 0, 2, 1, 8),
        ("narrow values", [(3, 9), (1, 5), (1, 12)], 0, 4, 2, 16),
        ("narrow values, long keys", [(9, 19)], 0, 2, 2, 192),
        ("pages of 128", [(3, 150), (1, 5), (2, 128)], 0, 4, 2, 64),
        ("pages of 128, window", [(4, 140), (1, 300)], 9, 2, 1, 64),
        ("sinks", [(7, 7), (1, 5), (3, 9), (1, 1)], 0, 4, 2, 16),
        ("sinks, decode, window", [(1, 5), (1, 1), (1, 16)], 6, 4, 1, 24),
        ("sinks, window, pages of 128", [(4, 140), (1, 300), (5, 5)], 9, 4, 2, 64),
        ("FP8 cache", [(3, 9), (1, 12), (6, 6), (1, 4)], 0, 4, 2, 32),
        ("FP8 cache, decode, window", [(1, 5), (1, 1), (1, 16)], 6, 4, 1, 24),
    ):
        page_size, pages = (128, 7) if "pages of 128" in label else (4, 17)
        tokens = sum(n for n, _ in requests) + (3 if label.startswith("padding") else 0)
        start = list(accumulate((n for n, _ in requests), initial=0))
        cache = torch.randn(2, pages, page_size, kv_heads, dim, generator=generator).to(dtype)
        cache[:, 0] = float("nan")  # see draw_table
        if label.startswith("FP8"):
            cache = cache.to(torch.float8_e4m3fn)
        table = draw_table([-(-length // page_size) for _, length in requests], pages, generator)
        call = AttentionCall(
            q_THD=torch.randn(tokens, heads, dim, generator=generator).to(dtype),
            k_PSGD=cache[0],
            v_PSGE=cache[1, ..., : dim * 2 // 3] if label.startswith("narrow") else cache[1],
            page_table_RM=table,
            query_start_R=torch.tensor(start, dtype=torch.int32),
            context_len_R=torch.tensor([length for _, length in requests], dtype=torch.int32),
            scale=dim**-0.5,
            window=window,
            max_query=0 if "chunked" in label else max(n for n, _ in requests),
            v_scale=0.3 if label.startswith("FP8") else 1.0,
            sink_H=torch.randn(heads, generator=generator).to(dtype) if label.startswith("sinks") else None,
        )
        yield label, {"call": call}


@op(samples=samples)
def attention(call: AttentionCall) -> torch.Tensor:
    """out_THE. A query sees itself and what came before it; with a window, only the last `window` tokens, itself
    included, and page-table entries before the window are never read. Rows of no request (padding) give zeros."""
    q_THD, k_PSGD, v_PSGE = call.q_THD, call.k_PSGD, call.v_PSGE
    out_THE = q_THD.new_zeros(*q_THD.shape[:2], v_PSGE.shape[3])
    page_size, heads_per_kv = k_PSGD.shape[1], q_THD.shape[1] // k_PSGD.shape[2]
    starts, lengths, window = call.query_start_R.tolist(), call.context_len_R.tolist(), call.window
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        num_queries = rows.stop - rows.start
        if num_queries == 0:
            continue
        first_query = length - num_queries
        first_key = max(0, first_query - window + 1) if window else 0
        first_page = first_key // page_size
        pages = call.page_table_RM[r, first_page : -(-length // page_size)].long()
        keys = slice(first_key - first_page * page_size, length - first_page * page_size)
        k_LHD = take(k_PSGD, pages).flatten(0, 1)[keys].float().repeat_interleave(heads_per_kv, dim=1)
        v_LHE = take(v_PSGE, pages).flatten(0, 1)[keys].float().repeat_interleave(heads_per_kv, dim=1)

        query = torch.arange(first_query, length, device=q_THD.device)[:, None]
        key = torch.arange(first_key, length, device=q_THD.device)[None, :]
        visible = key <= query
        if window:
            visible &= key > query - window
        scores_HQL = torch.einsum("qhd,lhd->hql", q_THD[rows].float(), k_LHD) * call.scale
        scores_HQL = scores_HQL.masked_fill(~visible, float("-inf"))
        if call.sink_H is not None:
            sink_HQ1 = call.sink_H.float()[:, None, None].expand(-1, num_queries, 1)
            scores_HQL = torch.cat([scores_HQL, sink_HQ1], -1)
        weights_HQL = scores_HQL.softmax(-1)[..., : k_LHD.shape[0]]
        out_THE[rows] = torch.einsum("hql,lhe->qhe", weights_HQL, v_LHE * call.v_scale).to(q_THD.dtype)
    return out_THE


def take(pages_PSGD: torch.Tensor, page: torch.Tensor) -> torch.Tensor:
    """Some pages, in one piece."""
    return as_bytes(pages_PSGD).index_select(0, page).view(pages_PSGD.dtype)
