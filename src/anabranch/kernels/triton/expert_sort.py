"""Pairs into expert order: one launch for few pairs, three for many. Nothing is read back to the host.

T tokens, K experts per token, N = T · K pairs, E experts, B blocks of pairs.

Few pairs: a pair's place is the number of pairs before it, so every program counts those for a few pairs, against all
N. That is N² comparisons, but spread over the whole machine they take less time than a second launch.

Many: count each block's pairs by expert; scan each expert's counts over the blocks; then a pair's place is its expert's
start + the expert's pairs in earlier blocks + those before it in its own block, which are counted as above.

Both are stable and leave nothing to chance: there are no atomics. A pair without an expert (id −1) counts as one of
expert E.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from anabranch import ops
from anabranch.kernels.triton.launch import cdiv, dependent_launch, next_power_of_2

MAX_EXPERTS = 512
FEW_PAIRS = 4096
FEW_SIZES = (128, 512, 2048, 4096)
BLOCK = 128
"""Pairs of a block, where there are many: comparisons per pair, against the size of the table of counts."""
SCAN_STEP = 1024


@triton.jit
def _load_expert(expert, pair, num_pairs, E: tl.constexpr):
    """−1 → E, which comes last; beyond the end: E + 1."""
    e = tl.load(expert + pair, mask=pair < num_pairs, other=E + 1).to(tl.int32)
    return tl.where(e < 0, E, e)


@triton.jit
def _is_below(key, bound):
    """1 or 0, by the sign of the difference: with the addition that follows, fewer instructions than a comparison."""
    return ((key - bound).to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit(do_not_specialize=["num_units"])
def sort_few_kernel(
    expert, order, start, num_units,
    E: tl.constexpr, UNIT: tl.constexpr, PAIRS: tl.constexpr, SHARE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first programs place pairs, the others count where experts start; each SHARE of them."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    num_pairs = num_units * UNIT
    pair_N = tl.arange(0, PAIRS)
    key_N = _load_expert(expert, pair_N, num_pairs, E) * PAIRS + pair_N
    num_placing = tl.cdiv(num_pairs, SHARE)
    mine = tl.program_id(0) * SHARE + tl.arange(0, SHARE)
    e = mine - num_placing * SHARE
    key = _load_expert(expert, mine, num_pairs, E) * PAIRS + mine
    key = tl.where(tl.program_id(0) < num_placing, key, e * PAIRS)
    place = tl.sum(_is_below(key_N[None, :], key[:, None]), 1)
    tl.store(order + place, mine, mask=mine < num_pairs)
    tl.store(start + e, place, mask=(e >= 0) & (e <= E))


@triton.jit(do_not_specialize=["num_units", "num_blocks"])
def count_kernel(
    expert, count_EB, num_units, num_blocks,
    E: tl.constexpr, UNIT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """count[e, b]: pairs of expert e in block b; e = E: those without one."""
    if DEPENDENT:
        gdc_wait()
    block = tl.program_id(0)
    e = _load_expert(expert, block * BLOCK + tl.arange(0, BLOCK), num_units * UNIT, E)
    count = tl.histogram(tl.where(e < E, e, 0), BINS, mask=e < E)
    bin = tl.arange(0, BINS)
    tl.store(count_EB + bin * num_blocks + block, count, mask=bin < E)
    tl.store(count_EB + E * num_blocks + block, tl.sum((e == E).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_blocks"])
def scan_kernel(count_EB, total, num_blocks, STEP: tl.constexpr, DEPENDENT: tl.constexpr):
    """count[e, b] becomes the number of e's pairs in blocks before b; total[e] is their number in all."""
    if DEPENDENT:
        gdc_wait()
    e = tl.program_id(0)
    before = 0
    for first in range(0, num_blocks, STEP):
        block = first + tl.arange(0, STEP)
        count = tl.load(count_EB + e * num_blocks + block, mask=block < num_blocks, other=0)
        tl.store(count_EB + e * num_blocks + block, before + tl.cumsum(count, 0) - count, mask=block < num_blocks)
        before += tl.sum(count, 0)
    tl.store(total + e, before)


@triton.jit(do_not_specialize=["num_units", "num_blocks"])
def place_kernel(
    expert, order, start, before_EB, total, num_units, num_blocks,
    E: tl.constexpr, UNIT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """BINS > E."""
    if DEPENDENT:
        gdc_wait()
    block, bin, slot = tl.program_id(0), tl.arange(0, BINS), tl.arange(0, BLOCK)
    num_pairs = num_units * UNIT
    pair = block * BLOCK + slot
    e = _load_expert(expert, pair, num_pairs, E)
    before = tl.load(before_EB + e * num_blocks + block, mask=pair < num_pairs, other=0)
    total_E = tl.load(total + bin, mask=bin <= E, other=0)
    if block == 0:
        tl.store(start + bin, tl.cumsum(total_E, 0) - total_E, mask=bin <= E)
    # A pair's rank in its block counts those of lower experts too; they are taken off its expert's start.
    others_E = total_E - tl.histogram(tl.minimum(e, E), BINS, mask=pair < num_pairs)
    start_E = tl.cumsum(others_E, 0) - others_E
    key = e * BLOCK + slot
    rank = tl.sum(_is_below(key[:, None], key[None, :]), 0)  # axis 0 lies in one thread: no shuffles
    place = tl.gather(start_E, tl.minimum(e, E), 0) + before + rank
    tl.store(order + place, pair, mask=pair < num_pairs)


def accepts(expert_TK: torch.Tensor, num_experts: int) -> bool:
    return expert_TK.is_contiguous() and num_experts <= MAX_EXPERTS


@ops.expert_sort.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def expert_sort(expert_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_pairs, device = expert_TK.numel(), expert_TK.device
    order_N = torch.empty(num_pairs, dtype=torch.int32, device=device)
    start_E = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    sort = sort_few if num_pairs <= FEW_PAIRS else sort_many
    sort(expert_TK, num_experts, order_N, start_E)
    return order_N, start_E


def sort_few(expert_TK: torch.Tensor, num_experts: int, order_N: torch.Tensor, start_E: torch.Tensor) -> None:
    num_pairs = expert_TK.numel()
    constants = constants_of_few(num_pairs, num_experts)
    dependent = dependent_launch(expert_TK.device)
    num_programs = cdiv(num_pairs, constants["SHARE"]) + cdiv(num_experts + 1, constants["SHARE"])
    sort_few_kernel[(num_programs,)](
        expert_TK,
        order_N,
        start_E,
        num_pairs // constants["UNIT"],
        **constants,
        DEPENDENT=dependent,
        **({"launch_pdl": True} if dependent else {}),
    )


def constants_of_few(num_pairs: int, num_experts: int) -> dict[str, int]:
    """Few sizes: each is compiled once. `UNIT` pairs are loaded at a time."""
    pairs = next(size for size in FEW_SIZES if num_pairs <= size)
    return {"E": num_experts, "UNIT": math.gcd(num_pairs, 4), "PAIRS": pairs, "SHARE": 8, "num_warps": 4}


def sort_many(expert_TK: torch.Tensor, num_experts: int, order_N: torch.Tensor, start_E: torch.Tensor) -> None:
    num_pairs, device = expert_TK.numel(), expert_TK.device
    count, scan, place = constants_of_many(num_pairs, num_experts)
    dependent = dependent_launch(device)
    options = {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
    num_units, num_blocks = num_pairs // count["UNIT"], cdiv(num_pairs, BLOCK)
    count_EB = torch.empty(num_experts + 1, num_blocks, dtype=torch.int32, device=device)
    total_E = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    count_kernel[(num_blocks,)](expert_TK, count_EB, num_units, num_blocks, **count, **options)
    scan_kernel[(num_experts + 1,)](count_EB, total_E, num_blocks, **scan, **options)
    place_kernel[(num_blocks,)](
        expert_TK, order_N, start_E, count_EB, total_E, num_units, num_blocks, **place, **options
    )


def constants_of_many(num_pairs: int, num_experts: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    blocks = {"E": num_experts, "UNIT": math.gcd(num_pairs, 4), "BLOCK": BLOCK, "num_warps": BLOCK // 32}
    return (
        blocks | {"BINS": next_power_of_2(num_experts)},
        {"STEP": SCAN_STEP, "num_warps": 8},
        blocks | {"BINS": next_power_of_2(num_experts + 1)},
    )
