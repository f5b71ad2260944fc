"""Paged attention on torch's fused attention: all decode rows of a step in one call, each prefill chunk in its own.

T token rows, R requests, H query heads, G key-value heads, D head dim, P pages, S slots in a page, M page-table width,
B decode rows, L keys.
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
    decoding = [r for r in range(len(lengths)) if starts[r + 1] - starts[r] == 1]
    for r in range(len(lengths)):
        if starts[r + 1] - starts[r] > 1:
            rows = slice(starts[r], starts[r + 1])
            out_THD[rows] = _prefill(q_THD[rows], k_PSGD, v_PSGD, page_table_RM[r], lengths[r], scale, window)
    if len(decoding) == len(lengths) == q_THD.shape[0]:
        return _decode(q_THD, k_PSGD, v_PSGD, page_table_RM, context_len_R, max(lengths), scale, window)
    if decoding:
        index = torch.tensor(decoding, device=q_THD.device)
        row = query_start_R[index].long()
        longest = max(lengths[r] for r in decoding)
        out_THD[row] = _decode(
            q_THD[row], k_PSGD, v_PSGD, page_table_RM[index], context_len_R[index], longest, scale, window
        )
    return out_THD


def _decode(
    q_BHD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    page_table_BM: torch.Tensor,
    context_len_B: torch.Tensor,
    longest: int,
    scale: float,
    window: int,
) -> torch.Tensor:
    """One query a request, keys gathered and padded to the longest context."""
    page_size = k_PSGD.shape[1]
    pages = page_table_BM[:, : -(-longest // page_size)].long()
    k_BGLD = k_PSGD[pages].flatten(1, 2).transpose(1, 2)
    v_BGLD = v_PSGD[pages].flatten(1, 2).transpose(1, 2)
    key = torch.arange(k_BGLD.shape[2], device=q_BHD.device)
    visible = key < context_len_B[:, None]
    if window:
        visible &= key >= context_len_B[:, None] - window
    # What is not visible may belong to anybody and hold NaN, which a weight of 0 does not cancel.
    hidden = ~visible[:, None, :, None]
    k_BGLD.masked_fill_(hidden, 0.0)
    v_BGLD.masked_fill_(hidden, 0.0)
    # The heads that share a key head become its queries, so that no key is copied.
    q_BGQD = q_BHD.unflatten(1, (k_BGLD.shape[1], -1))
    out = F.scaled_dot_product_attention(q_BGQD, k_BGLD, v_BGLD, attn_mask=visible[:, None, None], scale=scale)
    return out.flatten(1, 2)


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
