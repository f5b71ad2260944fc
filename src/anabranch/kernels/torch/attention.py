"""Paged attention on torch's fused attention: prefill chunks one by one, decode rows in groups of similar length.

Which pages to gather is worked out once for all layers of a step: they pass the same page table.

T token rows, R requests, H query heads, G key-value heads, D head dim, E that of values, P pages, S slots in a page,
M page-table width, Q queries of one request, B decode rows of a group, L keys of each.
"""

import functools
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from anabranch import ops
from anabranch.ops.attention import AttentionCall, take

MAX_PADDING = 1.25
"""A group's keys, padded to its longest row, over those that are needed."""
MASK_ELEMENTS = 1 << 25
"""Of a mask with a row for each head, at once."""


@dataclass(frozen=True, slots=True)
class Group:
    """Decode rows that are done in one call."""

    row_B: torch.Tensor | slice
    """Their token rows."""
    pages: torch.Tensor
    """Flat: each row's pages, as many as the longest has; what is padding repeats the row's own last page."""
    stale: torch.Tensor | None
    """Slots of those pages that the row has not filled: they may hold anything, NaN too."""
    visible: torch.Tensor | None
    """[B, 1, 1, L]; None: one row, cut to length instead."""
    keys: slice


@ops.attention.kernel("torch")
def attention(call: AttentionCall) -> torch.Tensor:
    q_THD = call.q_THD
    starts, lengths = tuple(call.query_start_R.tolist()), tuple(call.context_len_R.tolist())
    prefills, groups = _grouped(call.page_table_RM, starts, lengths, call.k_PSGD.shape[1], call.window)
    out_THE = q_THD.new_zeros(*q_THD.shape[:2], call.v_PSGE.shape[3])
    for r in prefills:
        rows = slice(starts[r], starts[r + 1])
        out_THE[rows] = _prefill(q_THD[rows], call, r, lengths[r])
    for group in groups:
        out_THE[group.row_B] = _decode(q_THD[group.row_B], call, group)
    return out_THE if call.v_scale == 1 else out_THE.mul_(call.v_scale)


def _decode(q_BHD: torch.Tensor, call: AttentionCall, group: Group) -> torch.Tensor:
    k_LGD, v_LGE = (_gathered(x, group.pages, q_BHD.dtype) for x in (call.k_PSGD, call.v_PSGE))
    if group.stale is not None:  # a weight of 0 does not cancel NaN
        k_LGD.index_fill_(0, group.stale, 0.0)
        v_LGE.index_fill_(0, group.stale, 0.0)
    k_BGLD, v_BGLE = (x.unflatten(0, (q_BHD.shape[0], -1))[:, group.keys].transpose(1, 2) for x in (k_LGD, v_LGE))
    # The heads that share a key head become its queries, so that no key is copied.
    q_BGQD = q_BHD.unflatten(1, (k_BGLD.shape[1], -1))
    mask = group.visible
    if call.sink_H is not None:
        k_BGLD, v_BGLE, mask = _with_sink(k_BGLD, v_BGLE, mask, call.sink_H.view(1, *q_BGQD.shape[1:3], 1))
    out = F.scaled_dot_product_attention(q_BGQD, k_BGLD, v_BGLE, attn_mask=mask, scale=call.scale)
    return out.flatten(1, 2)


def _with_sink(
    k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, sink: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k, v, mask) with one key more, of zeros, whose score the mask adds: `sink`, a column for the heads and queries
    of the scores."""
    sink = sink.to(k.dtype)
    seen = sink.new_zeros(k.shape[-2]) if visible is None else sink.new_zeros(()).where(visible, float("-inf"))
    shape = torch.broadcast_shapes(sink.shape[:-1], seen.shape[:-1])
    mask = torch.cat([seen.expand(*shape, -1), sink.expand(*shape, 1)], -1)
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), mask


def _gathered(pages_PSGD: torch.Tensor, page: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The slots of these pages, one after the other, as numbers to compute with."""
    return take(pages_PSGD, page).flatten(0, 1).to(dtype)


@functools.lru_cache(maxsize=1)  # the layers of a step pass the same tensor; a tensor's hash is its identity
def _grouped(
    page_table_RM: torch.Tensor, starts: tuple[int, ...], lengths: tuple[int, ...], page_size: int, window: int
) -> tuple[list[int], list[Group]]:
    """(requests that are prefilled, groups of those that decode)."""
    counts = [end - begin for begin, end in itertools.pairwise(starts)]
    # Rows of padding have no context, and stay zeros.
    decoding = sorted((r for r, n in enumerate(counts) if n == 1 and lengths[r]), key=lambda r: lengths[r])
    tables = page_table_RM.tolist() if decoding else []
    groups: list[Group] = []
    while decoding:
        # From the longest down, as long as padding to it stays cheap.
        longest, total, size = lengths[decoding[-1]], 0, 0
        for r in reversed(decoding):
            if size and longest * (size + 1) > MAX_PADDING * (total + lengths[r]):
                break
            total, size = total + lengths[r], size + 1
        members, decoding = sorted(decoding[-size:]), decoding[:-size]
        groups.append(_group([(starts[r], lengths[r], tables[r]) for r in members], page_size, window, page_table_RM))
    return [r for r, n in enumerate(counts) if n > 1], groups


def _group(members: list[tuple[int, int, list[int]]], page_size: int, window: int, like: torch.Tensor) -> Group:
    """Of (token row, length, page table) each."""
    first_pages = [max(0, length - window) // page_size if window else 0 for _, length, _ in members]
    ends = [-(-length // page_size) for _, length, _ in members]
    width = max(end - first for first, end in zip(first_pages, ends, strict=True))
    pages: list[int] = []
    stale: list[int] = []
    for (_, length, table), first, end in zip(members, first_pages, ends, strict=True):
        own = table[first:end]
        begin = len(pages) * page_size
        pages += own + own[-1:] * (width - len(own))
        filled = length % page_size or page_size
        for last in range(len(own) - 1, width):
            stale += range(begin + last * page_size + filled, begin + (last + 1) * page_size)
    rows = [row for row, _, _ in members]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=like.device)

    if len(members) == 1:
        (row, length, _), first = members[0], first_pages[0]
        keys = slice(max(0, length - window) - first * page_size if window else 0, length - first * page_size)
        return Group(slice(row, row + 1), tensor(pages), None, None, keys)
    key = torch.arange(width * page_size, device=like.device)
    end_B1 = tensor([length - first * page_size for (_, length, _), first in zip(members, first_pages)])[:, None]
    visible = key < end_B1
    if window:
        visible &= key >= end_B1 - window
    in_order = rows == list(range(rows[0], rows[0] + len(rows)))
    return Group(
        slice(rows[0], rows[-1] + 1) if in_order else tensor(rows),
        tensor(pages),
        tensor(stale) if stale else None,
        visible[:, None, None],
        slice(0, width * page_size),
    )


def _prefill(q_QHD: torch.Tensor, call: AttentionCall, r: int, length: int) -> torch.Tensor:
    """The last Q tokens of request r, which has `length`."""
    window, page_size, first_query = call.window, call.k_PSGD.shape[1], length - q_QHD.shape[0]
    some = max(1, MASK_ELEMENTS // max(1, q_QHD.shape[1] * length))
    if call.sink_H is not None and q_QHD.shape[0] > some:  # the mask has a row for each head
        blocks = q_QHD.split(some)
        ends = itertools.accumulate(map(len, blocks), initial=first_query)
        next(ends)
        return torch.cat([_prefill(block, call, r, end) for block, end in zip(blocks, ends, strict=True)])
    first_key = max(0, first_query - window + 1) // page_size * page_size if window else 0
    pages = call.page_table_RM[r, first_key // page_size : -(-length // page_size)].long()
    k_LGD, v_LGE = (_gathered(x, pages, q_QHD.dtype)[: length - first_key] for x in (call.k_PSGD, call.v_PSGE))
    mask = None
    if first_query or window or call.sink_H is not None:
        query = torch.arange(first_query, length, device=q_QHD.device)[:, None]
        key = torch.arange(first_key, length, device=q_QHD.device)
        mask = key <= query
        if window:
            mask &= key > query - window
    k_GLD, v_GLE = k_LGD.transpose(0, 1), v_LGE.transpose(0, 1)
    if call.sink_H is not None:
        k_GLD, v_GLE, mask = _with_sink(k_GLD, v_GLE, mask, call.sink_H[:, None, None])
    D, E = k_GLD.shape[2], v_GLE.shape[2]
    if D > E:  # where they are not the same, all scores would be in memory
        v_GLE = F.pad(v_GLE, (0, D - E))
    out = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None],
        k_GLD[None],
        v_GLE[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.scale,
        enable_gqa=True,
    )
    return out[0, ..., :E].transpose(0, 1)
