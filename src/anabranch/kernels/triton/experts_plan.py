"""Which rows each tile of a grouped product reads: pairs in expert order, split into tiles of one expert each.

T tokens, K experts per token, N = T · K pairs, E experts, M tiles, G chunks of pairs.

Sizes that depend on the routing stay on the device. The host knows only an upper bound M of the number of tiles: every
expert has at most one tile that is not full. Pairs of an expert are in no particular order: the bits of a product's row
do not depend on its place in a tile.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from anabranch.kernels.triton.launch import cdiv, next_power_of_2, wait_for_predecessor
from anabranch.kernels.tuning.experts_tiles import padded_tokens
from anabranch.ops.experts import ExpertsCall

ONE_KERNEL = (256, 512, 1024, 2048, 4096, 8192)
"""Up to the last bound, every program counts all pairs, and each bound is a version of the kernel; above, a separate
kernel counts chunks."""
FEW_CHUNKS = 64
"""The least number of chunks that the second kernel is compiled for."""


ZEROS = tl.constexpr(4096)
"""That a program writes at once."""
ZERO_PROGRAMS = 128
"""That share zeros out, at most: about as many as a large device has multiprocessors."""


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Tile m holds rows begin[m] .. end[m] of expert[m]; row r belongs to pair order_N[r].

    A tile has at most BM rows, and up to EXTRA more where that saves a last tile with few rows.
    """

    order_N: torch.Tensor
    """int32; rows after the last expert's are not written."""
    weight_N: torch.Tensor
    """fp32: the router weight of each row, times `scaling`."""
    tile_3M: torch.Tensor
    """int32: expert, begin, end of each tile; expert −1: an unused one."""
    head: torch.Tensor
    """int32: the number of used tiles, then two counters that start at zero."""
    max_tiles: int


def max_tiles(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """An upper bound of Σ ⌈rows of an expert / BM⌉ for any routing."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // block_rows


def order_rows(
    call: ExpertsCall, block_rows: int, extra_rows: int, launch: dict[str, Any], zeros: torch.Tensor | None = None
) -> RowOrder:
    """`zeros`: is filled with zeros besides."""
    expert_TK, num_experts = call.expert_TK, call.down_EDI.shape[0]
    num_pairs, device = expert_TK.numel(), expert_TK.device
    tiles = max_tiles(num_pairs, num_experts, block_rows)
    padded = next_power_of_2(num_experts)
    # For the number of tokens that tiles are chosen for, so that few versions exist and a start can compile them all.
    most_pairs = padded_tokens(expert_TK.shape[0]) * expert_TK.shape[1]
    bound = next((bound for bound in ONE_KERNEL if bound >= most_pairs), 0)
    chunk = min(256, bound) if bound else max(1024, next_power_of_2(most_pairs) // 128)
    num_chunks = cdiv(num_pairs, chunk)
    order_N = torch.empty(num_pairs, dtype=torch.int32, device=device)
    weight_N = torch.empty(num_pairs, dtype=torch.float32, device=device)
    tile_3M = torch.empty(3, tiles, dtype=torch.int32, device=device)
    head = torch.empty(3, dtype=torch.int32, device=device)
    num_zeros = 0 if zeros is None else zeros.numel()
    more = 0 if zeros is None else min(cdiv(num_zeros, ZEROS.value), ZERO_PROGRAMS)
    programs = max(num_chunks, more)
    cursor_GE = torch.empty(programs, padded, dtype=torch.int32, device=device)
    count_GE = cursor_GE  # not read where every program counts all pairs
    warps = 4 if 0 < bound <= 1024 else 8
    if not bound:
        count_GE = torch.empty_like(cursor_GE)
        count_pairs[(num_chunks,)](expert_TK, count_GE, num_pairs, CHUNK=chunk, EP=padded, num_warps=warps, **launch)
    place_pairs[(programs,)](
        expert_TK, count_GE, cursor_GE, call.weight_TK, order_N, weight_N, tile_3M, head, zeros,
        num_pairs, tiles, num_chunks, num_zeros, call.scaling,
        BM=block_rows, EXTRA=extra_rows, CHUNK=chunk, EP=padded,
        GP=1 if bound else max(FEW_CHUNKS, next_power_of_2(cdiv(most_pairs, chunk))),
        NP=bound, num_warps=warps, **launch,
    )  # fmt: skip
    return RowOrder(order_N, weight_N, tile_3M, head, tiles)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(expert_N, count_GE, num_pairs, CHUNK: tl.constexpr, EP: tl.constexpr, DEPENDENT: tl.constexpr):
    g = tl.program_id(0)
    wait_for_predecessor(DEPENDENT)
    pair = g * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(expert_N + pair, mask=pair < num_pairs, other=-1)
    tl.store(count_GE + g * EP + tl.arange(0, EP), tl.histogram(expert, EP, mask=expert >= 0))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "num_chunks", "num_zeros"])
def place_pairs(
    expert_N, count_GE, cursor_GE, weight_TK, order_N, weight_N, tile_3M, head, zeros,
    num_pairs, max_tiles, num_chunks, num_zeros, scaling,
    BM: tl.constexpr, EXTRA: tl.constexpr, CHUNK: tl.constexpr, EP: tl.constexpr, GP: tl.constexpr, NP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Every program places the pairs of its chunk and writes its share of the tiles and of zeros."""
    g = tl.program_id(0)
    e = tl.arange(0, EP)
    wait_for_predecessor(DEPENDENT)
    if zeros is not None:
        for some in range(g * ZEROS, num_zeros, tl.num_programs(0) * ZEROS):
            place = some + tl.arange(0, ZEROS)
            tl.store(zeros + place, tl.zeros([ZEROS], zeros.dtype.element_ty), mask=place < num_zeros)
    pair = g * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(expert_N + pair, mask=pair < num_pairs, other=-1)
    weight = tl.load(weight_TK + pair, mask=expert >= 0, other=0.0)
    if NP:
        all_pairs = tl.arange(0, NP)
        experts = tl.load(expert_N + all_pairs, mask=all_pairs < num_pairs, other=-1)
        count = tl.histogram(experts, EP, mask=(experts >= 0) & (all_pairs >= g * CHUNK))
        if NP > CHUNK:
            before = tl.histogram(experts, EP, mask=(experts >= 0) & (all_pairs < g * CHUNK))
            count += before
        else:
            before = tl.zeros_like(count)
    else:
        chunk = tl.arange(0, GP)[:, None]
        counts = tl.load(count_GE + chunk * EP + e[None, :], mask=chunk < num_chunks, other=0)
        count = tl.sum(counts, 0)
        before = tl.sum(tl.where(chunk < g, counts, 0), 0)
    end = tl.cumsum(count, 0)
    begin = end - count
    # Ranks come from a counter in memory for each expert of the chunk.
    tl.store(cursor_GE + g * EP + e, begin + before)
    tl.debug_barrier()
    row = tl.atomic_add(cursor_GE + g * EP + expert, 1, mask=expert >= 0, sem="relaxed")
    tl.store(order_N + row, pair, mask=expert >= 0)
    tl.store(weight_N + row, weight * scaling, mask=expert >= 0)

    # One tile of every expert at a time; programs take turns.
    rest = count % BM
    surplus = tl.where((rest <= 2 * EXTRA) & (rest <= count // BM * EXTRA), rest, 0)
    tiles = count // BM + ((rest > 0) & (surplus == 0)).to(tl.int32)
    slot = tl.cumsum(tiles, 0) - tiles
    total = tl.sum(tiles, 0)
    for j in range(g, tl.max(tiles, 0), num_chunks):
        first = begin + j * BM + tl.minimum(j * EXTRA, surplus)
        stop = begin + (j + 1) * BM + tl.minimum((j + 1) * EXTRA, surplus)
        mine = j < tiles
        tl.store(tile_3M + slot + j, e, mask=mine)
        tl.store(tile_3M + max_tiles + slot + j, first, mask=mine)
        tl.store(tile_3M + 2 * max_tiles + slot + j, tl.minimum(stop, end), mask=mine)
    if g == 0:
        three = tl.arange(0, 4)
        tl.store(head + three, tl.where(three == 0, total, 0), mask=three < 3)
        for unused in range(total, max_tiles, EP):
            tl.store(tile_3M + unused + e, -1, mask=unused + e < max_tiles)
