"""Paged attention on torch's fused attention, one call a request.

T token rows, R requests, H query heads, G key-value heads, D head dim, P pages, S slots in a page, M page-table width,
Q queries of one request, L keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from anabranch import ops


@ops.attention.kernel("torch")
def attention(
    q_THD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    page_table_RM: torch.Tensor,
    query_start_R: torch.Tensor,
    context_len_R: torch.Tensor,
    scale: float,
    window: int = 0,
) -> torch.Tensor:
    out_THD = torch.zeros_like(q_THD)
    starts, lengths = query_start_R.tolist(), context_len_R.tolist()
    decoding = []
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        if rows.stop - rows.start == 1:
            decoding.append(r)
        elif rows.stop > rows.start:
            out_THD[rows] = _prefill(q_THD[rows], k_PSGD, v_PSGD, page_table_RM[r], length, scale, window)
    if decoding:
        _decode(out_THD, q_THD, k_PSGD, v_PSGD, page_table_RM, decoding, starts, lengths, scale, window)
    return out_THD


def _decode(
    out_THD: torch.Tensor,
    q_THD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    page_table_RM: torch.Tensor,
    decoding: list[int],
    starts: list[int],
    lengths: list[int],
    scale: float,
    window: int,
) -> None:
    """One query a request. All their pages are gathered at once, only those that are seen; then each request looks at
    its own keys, exactly as many as it has: nothing is padded, and nobody's stray NaN is near."""
    page_size, num_kv_heads = k_PSGD.shape[1:3]
    firsts = [max(0, lengths[r] - window) if window else 0 for r in decoding]
    spans = [(first // page_size, -(-lengths[r] // page_size)) for first, r in zip(firsts, decoding, strict=True)]
    if len(decoding) == 1:
        pages = page_table_RM[decoding[0], spans[0][0] : spans[0][1]]
    else:
        pages = torch.cat([page_table_RM[r, a:b] for r, (a, b) in zip(decoding, spans, strict=True)])
    k_LGD = k_PSGD.index_select(0, pages).flatten(0, 1)
    v_LGD = v_PSGD.index_select(0, pages).flatten(0, 1)
    begin = 0
    for r, first, (page, last) in zip(decoding, firsts, spans, strict=True):
        keys = slice(begin + first - page * page_size, begin + lengths[r] - page * page_size)
        # The heads that share a key head become its queries, so that no key is copied.
        row = starts[r]
        out_THD[row] = F.scaled_dot_product_attention(
            q_THD[row].unflatten(0, (num_kv_heads, -1))[None],
            k_LGD[keys].transpose(0, 1)[None],
            v_LGD[keys].transpose(0, 1)[None],
            scale=scale,
        ).view(q_THD.shape[1:])
        begin += (last - page) * page_size


def _prefill(
    q_QHD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    page_table_M: torch.Tensor,
    length: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """The last Q tokens of one request's `length`."""
    page_size, first_query = k_PSGD.shape[1], length - q_QHD.shape[0]
    first_key = max(0, first_query - window + 1) // page_size * page_size if window else 0
    pages = page_table_M[first_key // page_size : -(-length // page_size)].long()
    k_GLD = k_PSGD[pages].flatten(0, 1)[: length - first_key].transpose(0, 1)
    v_GLD = v_PSGD[pages].flatten(0, 1)[: length - first_key].transpose(0, 1)
    mask = None
    if first_query or window:
        query = torch.arange(first_query, length, device=q_QHD.device)[:, None]
        key = torch.arange(first_key, length, device=q_QHD.device)
        mask = key <= query
        if window:
            mask &= key > query - window
    out = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        k_GLD[None],
        v_GLD[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
