"""Attention over paged latent rows (MLA): one row of a token serves all heads as key and as value.

T tokens of all requests one after another, R requests, H query heads, L latent dims, F dims that have turned, C = L + F
numbers kept of a token, P pages, S slots in a page, M page-table width.

The keys of a head are a matrix times the latent row, so q · (W c) = (Wᵀ q) · c: queries are taken to the latent space
instead, and so is the result, which is Σ p c, from which W of the values makes that of a head.
"""

from itertools import accumulate
from typing import NamedTuple

import torch

from anabranch.ops.attention import draw_table
from anabranch.ops.op import Samples, op

SCORES = 1 << 24
"""Of the reference, at once."""


class LatentAttentionCall(NamedTuple):
    q_THL: torch.Tensor
    """In the latent space."""
    q_turned_THF: torch.Tensor
    """The part that has turned."""
    rows_PSC: torch.Tensor
    """Of each token its latent row and then its key that has turned, those of this step's tokens included."""
    page_table_RM: torch.Tensor
    """int32."""
    query_start_R: torch.Tensor
    """int32, R + 1 entries: request r has the rows query_start_R[r] .. query_start_R[r + 1]."""
    context_len_R: torch.Tensor
    """int32: tokens of a request; its rows are the last of them."""
    scale: float
    max_query: int = 0
    """At least the most rows of a request (0: not known)."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    # Each request: (tokens in this step, context length after it).
    for label, requests, heads, latent, turned in (
        ("one prefill", [(7, 7)], 4, 32, 16),
        ("decode", [(1, 5), (1, 1), (1, 16)], 4, 32, 16),
        ("mixed, chunked", [(3, 9), (1, 12), (6, 6), (1, 4)], 2, 16, 8),
        ("padding rows and an empty request", [(2, 6), (0, 0), (1, 1)], 3, 24, 4),
        ("decode, padding rows", [(1, 6), (0, 0), (1, 1)], 20, 64, 16),
        ("pages of 128", [(3, 150), (1, 5), (2, 128)], 5, 64, 16),
        ("pages of 128, decode", [(1, 300), (1, 129)], 16, 64, 16),
    ):
        page_size, pages = (128, 7) if label.startswith("pages of 128") else (4, 17)
        tokens = sum(n for n, _ in requests) + (3 if "padding" in label else 0)
        start = list(accumulate((n for n, _ in requests), initial=0))
        rows = torch.randn(pages, page_size, latent + turned, generator=generator).to(dtype)
        rows[0] = float("nan")  # see draw_table
        table = draw_table([-(-length // page_size) for _, length in requests], pages, generator)
        # The part that has turned is a slice of the queries.
        q = torch.randn(tokens, heads, 8 + turned, generator=generator).to(dtype)
        call = LatentAttentionCall(
            q_THL=torch.randn(tokens, heads, latent, generator=generator).to(dtype),
            q_turned_THF=q[..., 8:],
            rows_PSC=rows,
            page_table_RM=table,
            query_start_R=torch.tensor(start, dtype=torch.int32),
            context_len_R=torch.tensor([length for _, length in requests], dtype=torch.int32),
            scale=(latent + turned) ** -0.5,
            max_query=0 if "chunked" in label else max(n for n, _ in requests),
        )
        yield label, {"call": call}


@op(samples=samples)
def latent_attention(call: LatentAttentionCall) -> torch.Tensor:
    """out_THL, in the latent space. A query sees itself and what came before it. Rows of no request (padding) give
    zeros."""
    q_THC = torch.cat([call.q_THL, call.q_turned_THF], -1).float()
    out_THL, latent = torch.zeros_like(call.q_THL), call.q_THL.shape[2]
    starts, page_size = call.query_start_R.tolist(), call.rows_PSC.shape[1]
    for r, length in enumerate(call.context_len_R.tolist()):
        if starts[r] == starts[r + 1]:
            continue
        pages = call.page_table_RM[r, : -(-length // page_size)].long()
        k_NC = call.rows_PSC.index_select(0, pages).flatten(0, 1)[:length].float()
        some = max(1, SCORES // max(1, q_THC.shape[1] * length))
        for begin in range(starts[r], starts[r + 1], some):
            rows = slice(begin, min(begin + some, starts[r + 1]))
            query = torch.arange(rows.start, rows.stop, device=k_NC.device) - starts[r + 1] + length
            hidden = torch.arange(length, device=k_NC.device)[None, :] > query[:, None]
            scores_HQN = torch.einsum("qhc,nc->hqn", q_THC[rows], k_NC) * call.scale
            weights_HQN = scores_HQN.masked_fill_(hidden, float("-inf")).softmax(-1)
            out_THL[rows] = torch.einsum("hqn,nl->qhl", weights_HQN, k_NC[:, :latent]).to(out_THL.dtype)
    return out_THL
