"""Attention on torch's fused kernel for CPUs, called with few shapes: blocks of queries of one request, and keys in
the kernel's own blocks of KEYS, which are counted from position 0 whatever a step has of a request.

Which numbers of queries, and of keys in the last block, give the same bits is found out on this machine, as in
`blocks`. Computed in fp32, because for shorter numbers that kernel chooses code by the size of the batch.

T token rows, G key-value heads, J query heads of each, D head dim, E that of values, P pages, S slots in a page, B
blocks, Q queries of a block, L keys.
"""

import functools
import itertools
import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F

from anabranch import ops
from anabranch.kernels.invariant import in_c
from anabranch.kernels.invariant.blocks import agreeing
from anabranch.ops.attention import AttentionCall, take
from anabranch.ops.latent_attention import LatentAttentionCall
from anabranch.platforms.cpu import threads

KEYS = 512
"""Keys that the kernel takes at once."""
LAST = (64, 128, 256, KEYS)
"""Numbers of keys in the last block that are tried, and of queries in a block."""
QUERIES = (1, 2, 4, 8, 16)
PIVOT = 8
PIECE = 256
"""Queries of a prompt that are one call, and so share keys."""
KEPT = 1 << 22
"""Elements of a mask up to which it is kept for the next layer."""


class Sizes(NamedTuple):
    """What agrees."""

    queries: tuple[int, ...]
    last: tuple[int, ...]
    one_thread: bool
    """Only so does it."""


class Part(NamedTuple):
    """Blocks of one call: those of a prompt, or of tokens that follow as many keys."""

    row_BQ: torch.Tensor
    """Token rows; where there is none, some other row."""
    real_N: slice
    """Which of all B · Q are."""
    pages: torch.Tensor
    """Flat, of each block or of all."""
    length: int
    stale: torch.Tensor | None
    """[B or 1, L, 1, 1]: slots that are not filled, which may hold anything, NaN too."""
    position_BQ: torch.Tensor
    first_key: torch.Tensor
    """[B or 1]."""
    mask: torch.Tensor | None


def paged(
    q_TGJD: torch.Tensor,
    k_PSGD: torch.Tensor,
    v_PSGD: torch.Tensor,
    call: AttentionCall | LatentAttentionCall,
    window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out_TGJD, the log of each row's sum lse_TGJ), in fp32; zeros for rows of no request."""
    (T, G, J, D), page_size = q_TGJD.shape, k_PSGD.shape[1]
    sizes = _agreeing(G, J, D)
    starts, lengths = tuple(call.query_start_R.tolist()), tuple(call.context_len_R.tolist())
    out_TGJD, lse_TGJ = torch.zeros(T, G, J, D), torch.zeros(T, G, J)
    for part in _parts(call.page_table_RM, starts, lengths, page_size, window, J, sizes):
        (B, Q), mask = part.row_BQ.shape, part.mask
        q = q_TGJD[part.row_BQ.flatten()].float().unflatten(0, (B, Q)).permute(0, 2, 3, 1, 4).reshape(B, G, J * Q, D)
        k, v = (_gathered(x, part).expand(B, -1, -1, -1) for x in (k_PSGD, v_PSGD))
        with threads(1) if sizes.one_thread else nullcontext():
            out, lse = _fused(q, k, v, _mask(part, window, J) if mask is None else mask, call.scale)
        rows = part.row_BQ.flatten()[part.real_N]
        out_TGJD[rows] = out.unflatten(2, (J, Q)).permute(0, 3, 1, 2, 4).flatten(0, 1)[part.real_N]
        lse_TGJ[rows] = lse.unflatten(2, (J, Q)).permute(0, 3, 1, 2).flatten(0, 1)[part.real_N]
    return out_TGJD, lse_TGJ


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
        q, k, v, attn_mask=mask, scale=scale
    )


def _gathered(pages_PSGD: torch.Tensor, part: Part) -> torch.Tensor:
    """[B or 1, G, L, D]."""
    x = take(pages_PSGD, part.pages).flatten(0, 1).unflatten(0, (part.first_key.shape[0], -1))[:, : part.length]
    x = x.float()
    return (x if part.stale is None else x.masked_fill(part.stale, 0.0)).transpose(1, 2)


def _mask(part: Part, window: int, heads: int) -> torch.Tensor:
    key = torch.arange(part.length) + part.first_key[:, None, None]
    visible_BQL = key <= part.position_BQ[..., None]
    if window:
        visible_BQL &= key > part.position_BQ[..., None] - window
    mask_BQL = torch.zeros(visible_BQL.shape).masked_fill_(~visible_BQL, float("-inf"))
    return mask_BQL[:, None].expand(-1, heads, -1, -1).flatten(1, 2)[:, None]


@functools.lru_cache(maxsize=4)  # layers pass the same tensor; a tensor's hash is its identity
def _parts(
    page_table_RM: torch.Tensor,
    starts: tuple[int, ...],
    lengths: tuple[int, ...],
    page_size: int,
    window: int,
    heads: int,
    sizes: Sizes,
) -> list[Part]:
    unit, tables = math.lcm(KEYS, page_size), page_table_RM.tolist()
    single: dict[int, list[tuple[int, int, int]]] = {}
    parts = []

    def first_key(position: int) -> int:
        return max(0, position - window + 1) // unit * unit if window else 0

    def padded(keys: int) -> int:
        return keys // KEYS * KEYS + (min(n for n in sizes.last if n >= keys % KEYS) if keys % KEYS else 0)

    def add(row_BQ: torch.Tensor, position_BQ: torch.Tensor, real: slice, members: list[tuple[int, int, int]]) -> None:
        """`members`: request, end and first key of each block, or of all."""
        length = padded(members[0][1] - members[0][2])
        pages: list[int] = []
        for r, end, first in members:
            own = tables[r][first // page_size : -(-end // page_size)]
            pages += own + own[-1:] * (-(-length // page_size) - len(own))
        _, end_B, first_B = torch.tensor(members).T
        stale = (torch.arange(length) >= (end_B - first_B)[:, None])[..., None, None]
        part = Part(row_BQ, real, torch.tensor(pages), length, stale, position_BQ, first_B, None)
        kept = row_BQ.numel() * heads * length <= KEPT
        parts.append(part._replace(mask=_mask(part, window, heads)) if kept else part)

    for r, (begin, stop) in enumerate(itertools.pairwise(starts)):
        if stop - begin == 1 and lengths[r]:
            first = first_key(lengths[r] - 1)
            single.setdefault(padded(lengths[r] - first), []).append((r, lengths[r], first))
        for row in range(begin, stop, PIECE) if stop - begin > 1 else ():
            count = min(PIECE, stop - row)
            position = lengths[r] - stop + row
            i_BQ = torch.arange(-(-count // sizes.queries[-1]) * sizes.queries[-1]).view(-1, sizes.queries[-1])
            members = [(r, position + count, first_key(position))]
            add((row + i_BQ).clamp(max=stop - 1), position + i_BQ, slice(0, count), members)
    for members in single.values():
        row_B, end_B = torch.tensor([(starts[r], end) for r, end, _ in members]).T
        row_BQ, end_BQ = (x[:, None].expand(-1, sizes.queries[0]) for x in (row_B, end_B))
        add(row_BQ, end_BQ - 1, slice(0, None, sizes.queries[0]), members)
    return parts


@functools.cache
def _agreeing(G: int, J: int, D: int) -> Sizes:
    G, most, generator = min(G, 2), QUERIES[-1], torch.Generator().manual_seed(0)  # heads are computed one by one
    q = torch.randn(most, G, J, D, generator=generator)
    k, v = torch.randn(2, 1, G, 2 * KEYS, D, generator=generator)

    def compute(queries: int, length: int, keys: int, window: int) -> torch.Tensor:
        """Of the last of so many keys, with padding to `length`."""
        position_BQ, nothing = torch.arange(keys - most, keys).view(-1, queries), torch.empty(0)
        part = Part(nothing, slice(0), nothing, length, None, position_BQ, torch.tensor([0]), None)
        q_BGRD = q.unflatten(0, (-1, queries)).permute(0, 2, 3, 1, 4).reshape(-1, G, J * queries, D)
        k_BGLD, v_BGLD = (x[:, :, :length].expand(q_BGRD.shape[0], -1, -1, -1) for x in (k, v))
        out, lse = _fused(q_BGRD, k_BGLD, v_BGLD, _mask(part, window, J), D**-0.5)
        return torch.cat([out, lse[..., None]], -1).unflatten(2, (J, queries)).movedim(3, 1).flatten(0, 1)

    # Keys in the last block: with none before, after a block of keys, and after one that is not seen.
    cases = [(n, before, window) for n in LAST for before, window in ((0, 0), (KEYS, 0), (KEYS, n - most))]
    with threads(1):
        expected = {case: compute(PIVOT, case[1] + KEYS, case[0] + case[1], case[2]) for case in cases}

    def same(queries: int, *lasts: int) -> bool:
        return all(
            torch.equal(compute(queries, before + last, before + last, window), expected[last, before, window])
            for last, before, window in cases
            if last in lasts
        )

    last = agreeing(lambda n: same(PIVOT, n), LAST, KEYS)
    queries = agreeing(lambda n: same(n, last[0], KEYS), QUERIES, PIVOT) if last else ()
    return Sizes(queries or (PIVOT,), last or (KEYS,), not queries)


@ops.attention.kernel("invariant", on=("cpu", "fake"))
def attention(call: AttentionCall) -> torch.Tensor:
    if (found := in_c.attended(call)) is not None:
        return found
    G, D, E = call.k_PSGD.shape[2], call.k_PSGD.shape[3], call.v_PSGE.shape[3]
    v_PSGD = call.v_PSGE if E == D else F.pad(call.v_PSGE, (0, D - E))
    out_TGJD, lse_TGJ = paged(call.q_THD.unflatten(1, (G, -1)), call.k_PSGD, v_PSGD, call, call.window)
    if call.sink_H is not None:  # a key more in the denominator
        out_TGJD /= (1 + (call.sink_H.float().view(G, -1) - lse_TGJ).exp())[..., None]
    return (out_TGJD[..., :E] * call.v_scale).flatten(1, 2).to(call.q_THD.dtype)


@ops.latent_attention.kernel("invariant", on=("cpu", "fake"))
def latent_attention(call: LatentAttentionCall) -> torch.Tensor:
    q_T1HC = torch.cat([call.q_THL, call.q_turned_THF], -1)[:, None]
    rows_PS1C = call.rows_PSC[:, :, None]
    out_T1HC, _ = paged(q_T1HC, rows_PS1C, rows_PS1C, call)
    return out_T1HC[:, 0, :, : call.q_THL.shape[2]].to(call.q_THL.dtype)
