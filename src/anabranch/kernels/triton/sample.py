"""Sampling without a sort. Every step is exact (ops/exact.py), so the tokens are the reference's, always.

R requests, V vocabulary, S stretches of a row, C chunks of a scanned row, G of a gathered one, N listed tokens.

Logits may be bf16 or fp16: they become fp32, exactly, as they are loaded. Listed ones keep the row's dtype.

1. *scan* reads each row once, many programs a row: the maximum of each stretch of 128 tokens, and the best token:
   greedy, or after noise. Noise is computed only for tokens whose cheap bound reaches the best so far, one or two in a
   tile. Rows that ask for nothing else are done; step 3 only picks the best chunk.
2. *gather* lists the tokens of a row that can matter, reading stretches whose maximum does. Two bounds say which:
   * the k-th largest of the stretches' maxima: k tokens reach it, so none below is among the top k;
   * the token drawn from all: either it may stay, and is the answer, or it may not; then none ranked after it may.
   With top_p alone, masses are added up on the way: of all tokens, and of those ranked before the one drawn.
3. *choose*, one program a row, decides whether the token drawn from all may stay: how many tokens are ranked before it,
   and what is their mass? If it may not, the next one is drawn from those, until one may. That is seldom more than two
   draws; the ranking decides ties. With top_k and top_p together, the k-th logit is searched for first, because top_p
   refers to the mass of the top k.

A list that does not fit into its place (flat distributions) is not used: step 3 goes over the row itself, the same way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.exact import (
    EXACT,
    MOST_NOISE,
    TINY,
    hash_of,
    log,
    mass,
    mix,
    noise,
    noise_bound,
    target_mass,
)
from anabranch.kernels.triton.launch import FLOATS, cdiv, launch_options, next_power_of_2, wait_for_predecessor
from anabranch.kernels.triton.sample_search import before, from_key, is_before, kth_largest, load_step, to_key
from anabranch.ops.sample import NONE_ALLOWED as NONE_ALLOWED_ID
from anabranch.ops.sample import NOT_FINITE as NOT_FINITE_ID
from anabranch.ops.sample import SampleCall

STRETCH = 128
"""Tokens that a warp reads at a time."""
TILE, GATHER_TILE = 2048, 1024
"""Tokens of a row that a program reads at a time, scanning and gathering."""
STEP = 1024
"""Listed tokens that `choose` reads at a time."""
PIVOTS = 4
"""What a pass of a search compares with."""
PLACES = 1 << 22
"""For listed tokens of all rows, 8 bytes each; at least LIST of a row."""
LIST = 8192
SCAN_WARPS, GATHER_WARPS, CHOOSE_WARPS = 4, 4, 8
MAX_CHUNKS = 128
MAX_VOCABULARY = 1 << 19
NUM_SCANNING, NUM_GATHERING = 1056, 2048
"""Programs that keep a large GPU busy, 8 on each of 132 processors; twice as many where most have little to do."""
VECTORS = ["temperature_R", "top_k_R", "top_p_R", "min_p_R", "seed_R", "position_R"]
"""Callers keep them as rows of one tensor, aligned or not: one kernel for both."""

NO_TOKEN = tl.constexpr(1 << 30)
NOT_FINITE, NONE_ALLOWED = tl.constexpr(NOT_FINITE_ID), tl.constexpr(NONE_ALLOWED_ID)
WEIGHTLESS = tl.constexpr(-21.6)
"""Relative logits below have no mass."""


# Pieces


@triton.jit
def _draw(logits, value, id, kept, scale, state, best, token):
    """The best after noise, of a tile and what was found before, whichever tokens are tried."""
    bound = tl.where(kept, value * scale + noise_bound(mix(state ^ id.to(tl.uint32))), float("-inf"))
    high = tl.max(bound)
    while (high >= best) & (high > float("-inf")):
        i = tl.min(tl.where(bound == high, id, NO_TOKEN))
        noisy = tl.load(logits + i).to(tl.float32) * scale + noise(mix(state ^ i.to(tl.uint32)))
        better = (noisy > best) | ((noisy == best) & (i < token))
        best, token = tl.where(better, noisy, best), tl.where(better, i, token)
        bound = tl.where(id == i, float("-inf"), bound)
        high = tl.max(bound)
    return best, token


@triton.jit
def _merge(value_C, id_C, num_chunks, CHUNKS: tl.constexpr):
    """The best of a row's chunks: (value, token), the lowest id among equals; NO_TOKEN if nothing is allowed,
    NOT_FINITE, which is below every id, if a chunk holds NaN or infinity."""
    chunk = tl.arange(0, CHUNKS)
    value = tl.load(value_C + chunk, mask=chunk < num_chunks, other=float("-inf"))
    id = tl.load(id_C + chunk, mask=chunk < num_chunks, other=NO_TOKEN)
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, id, NO_TOKEN), 0)


@triton.jit
def _scale(temperature):
    return tl.div_rn(1.0, tl.where(temperature == 0, 1.0, temperature))


@triton.jit
def _least(min_p):
    """The lowest relative logit that min_p lets through."""
    return tl.where(min_p > 0, log(tl.minimum(tl.maximum(min_p, TINY), 1.0)), float("-inf"))


# 1. Scan


@triton.jit
def _load_tile(row, tile, V, TILE: tl.constexpr, STRETCH: tl.constexpr):
    """Stretches, one above the other. NaN becomes infinity, which a maximum does not lose."""
    id = tile * TILE + tl.arange(0, TILE // STRETCH)[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
    value = tl.load(row + id, mask=id < V, other=float("-inf")).to(tl.float32)
    return id, tl.where(value == value, value, float("inf"))


@triton.jit(do_not_specialize=["num_tiles", "tiles"], do_not_specialize_on_alignment=VECTORS)
def scan_kernel(
    logits, temperature_R, seed_R, position_R, best_RC, token_RC, peak_RS, count_R, V, stride, num_tiles, tiles,
    TILE: tl.constexpr, STRETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): `tiles` of the row's `num_tiles`."""
    wait_for_predecessor(DEPENDENT)
    row_id, chunk, num_chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row = logits + row_id.to(tl.int64) * stride
    temperature = tl.load(temperature_R + row_id)
    scale = _scale(temperature)
    state = hash_of(tl.load(seed_R + row_id), tl.load(position_R + row_id))
    if peak_RS is not None and chunk == 0:
        tl.store(count_R + row_id, 0)
    best, token = -float("inf"), NO_TOKEN
    first, end = chunk * tiles, tl.minimum(chunk * tiles + tiles, num_tiles)
    id, following = _load_tile(row, first, V, TILE, STRETCH)
    for tile in range(first, end):
        value = following
        id, following = _load_tile(row, tile + 1, tl.where(tile + 1 < end, V, 0), TILE, STRETCH)
        id -= TILE
        peak = tl.max(value, 1)
        if peak_RS is not None:
            num_stretches = (V + STRETCH - 1) // STRETCH
            place = tile * (TILE // STRETCH) + tl.arange(0, TILE // STRETCH)
            tl.store(peak_RS + row_id * num_stretches + place, peak, mask=place < num_stretches)
        high = tl.max(peak, 0)
        if high == float("inf"):
            best = high
            token = NOT_FINITE
        elif temperature == 0:
            if high > best:
                best = high
                token = tl.min(tl.where(value == high, id, NO_TOKEN))
        elif high * scale + MOST_NOISE >= best:
            best, token = _draw(row, value, id, id < V, scale, state, best, token)
    tl.store(best_RC + row_id * num_chunks + chunk, best)
    tl.store(token_RC + row_id * num_chunks + chunk, token)


# 2. Gather


@triton.jit(do_not_specialize=["num_chunks", "num_tiles", "tiles", "capacity"], do_not_specialize_on_alignment=VECTORS)
def gather_kernel(
    logits, temperature_R, top_k_R, top_p_R, min_p_R, best_RC, token_RC, peak_RS,
    count_R, value_RN, id_RN, found_R2, mass_RG2, V, stride, num_chunks, num_tiles, tiles, capacity,
    TILE: tl.constexpr, STRETCH: tl.constexpr, STRETCHES: tl.constexpr, CHUNKS: tl.constexpr,
    STEP: tl.constexpr, PIVOTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk). found_R2: the logit from which on tokens are listed, the best logit. mass_RG2, where top_p
    is alone: of all tokens, of those ranked before the one that was drawn."""
    wait_for_predecessor(DEPENDENT)
    row_id, chunk = tl.program_id(0), tl.program_id(1)
    temperature, top_k = tl.load(temperature_R + row_id), tl.load(top_k_R + row_id)
    top_p, min_p = tl.load(top_p_R + row_id), tl.load(min_p_R + row_id)
    if (temperature == 0) | ((top_k == 0) & (top_p >= 1) & (min_p <= 0)):
        return
    best, token = _merge(best_RC + row_id * num_chunks, token_RC + row_id * num_chunks, num_chunks, CHUNKS)
    if (token == NO_TOKEN) | (token == NOT_FINITE):
        return
    row = logits + row_id.to(tl.int64) * stride
    num_stretches = (V + STRETCH - 1) // STRETCH
    stretch = tl.arange(0, STRETCHES)
    peaks = peak_RS + row_id * num_stretches
    peak = tl.load(peaks + stretch, mask=stretch < num_stretches, other=float("-inf"))
    top = tl.max(peak, 0)
    pivot = -float("inf")
    if (top_k > 0) & (top_k <= num_stretches):
        lowest = tl.min(tl.where(stretch < num_stretches, peak, float("inf")), 0)
        pivot = from_key(kth_largest(peaks, num_stretches, top_k, to_key(lowest), to_key(top), STEP, PIVOTS))
    both = (top_k > 0) & (top_p < 1)  # top_p of the top k: all of them are needed
    logit = tl.load(row + token).to(tl.float32)
    if not both:
        pivot = tl.maximum(pivot, logit)
    if chunk == 0:
        tl.store(found_R2 + 2 * row_id, pivot)
        tl.store(found_R2 + 2 * row_id + 1, top)

    scale = _scale(temperature)
    weigh_all = (top_p < 1) & (top_k == 0)
    least = tl.where(both, -float("inf"), _least(min_p))
    total, first = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for tile in range(chunk * tiles, tl.minimum(chunk * tiles + tiles, num_tiles)):
        its = tile * (TILE // STRETCH) + tl.arange(0, TILE // STRETCH)
        high = tl.max(tl.load(peaks + its, mask=its < num_stretches, other=float("-inf")), 0)
        weigh = weigh_all & (high * scale - top * scale >= WEIGHTLESS)
        if weigh | (high >= pivot):
            id = tile * TILE + tl.arange(0, TILE)
            value = tl.load(row + id, mask=id < V, other=float("-inf")).to(tl.float32)
            relative = value * scale - top * scale
            if weigh:
                weight = mass(relative).to(tl.int64)
                total += tl.sum(weight, 0)
                if high >= logit:
                    first += tl.sum(tl.where(is_before(id < V, id, value, token, logit), weight, 0), 0)
            if high >= pivot:
                wanted = ((value >= pivot) & (relative >= least) & (id < V)).to(tl.int32)
                number = tl.sum(wanted, 0)
                if number > 0:
                    place = tl.atomic_add(count_R + row_id, number, sem="relaxed") + tl.cumsum(wanted, 0) - 1
                    mask = (wanted != 0) & (place < capacity)
                    tl.store(value_RN + row_id.to(tl.int64) * capacity + place, value, mask=mask)
                    tl.store(id_RN + row_id.to(tl.int64) * capacity + place, id, mask=mask)
    if weigh_all:
        place = 2 * (row_id * tl.num_programs(1) + chunk)
        tl.store(mass_RG2 + place, total)
        tl.store(mass_RG2 + place + 1, first)


# 3. Choose


@triton.jit
def _choose_listed(
    row, values, ids, listed, size, token, temperature, seed, position, top_k, top_p, min_p, total, first, low, top,
    STEP: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The token of a row where not all are allowed; `token` was drawn from all. `total` and `first` are masses, of all
    tokens and of those ranked before it; with top_k they are not known yet."""
    scale, least, state = _scale(temperature), _least(min_p), hash_of(seed, position)
    goal, limit = tl.full((), 1 << 62, tl.int64), tl.where(top_k > 0, top_k, NO_TOKEN)
    if top_p < 1:
        if top_k > 0:  # of the mass of the top k alone
            edge = from_key(kth_largest(values, size, top_k, to_key(low), to_key(top), STEP, PIVOTS))
            number, total = before(values, ids, listed, size, -1, edge, scale, top, STEP)
            total += (top_k - number) * mass(edge * scale - top * scale).to(tl.int64)
        goal = target_mass(total, top_p)
    logit, number, weight = tl.load(row + token).to(tl.float32), 0, first
    if top_k > 0:
        number, weight = before(values, ids, listed, size, token, logit, scale, top, STEP)
    stays = (number < limit) & (weight < goal) & (logit * scale - top * scale >= least)
    while not stays:
        best, rival = -float("inf"), NO_TOKEN
        for start in range(0, size, STEP):
            there, id, value = load_step(values, ids, listed, start, size, STEP)
            kept = is_before(there, id, value, token, logit) & (value * scale - top * scale >= least)
            best, rival = _draw(row, value, id, kept, scale, state, best, rival)
        token = rival
        logit = tl.load(row + token, mask=token != NO_TOKEN, other=0.0).to(tl.float32)
        number, weight = before(values, ids, listed, size, token, logit, scale, top, STEP)
        stays = ((number < limit) & (weight < goal)) | (token == NO_TOKEN)
    return token


@triton.jit(do_not_specialize=["num_chunks", "num_groups", "capacity"], do_not_specialize_on_alignment=VECTORS)
def choose_kernel(
    logits, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R, best_RC, token_RC,
    count_R, value_RN, id_RN, found_R2, mass_RG2, token_R, V, stride, num_chunks, num_groups, capacity,
    CHUNKS: tl.constexpr, STEP: tl.constexpr, PIVOTS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program: a row. Without lists: no token is excluded."""
    wait_for_predecessor(DEPENDENT)
    row_id = tl.program_id(0)
    best, token = _merge(best_RC + row_id * num_chunks, token_RC + row_id * num_chunks, num_chunks, CHUNKS)
    if count_R is not None:
        temperature, top_k = tl.load(temperature_R + row_id), tl.load(top_k_R + row_id)
        top_p, min_p = tl.load(top_p_R + row_id), tl.load(min_p_R + row_id)
        truncated = (temperature != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        if truncated & (token != NO_TOKEN) & (token != NOT_FINITE):
            row = logits + row_id.to(tl.int64) * stride
            num_weighed = tl.where((top_p < 1) & (top_k == 0), num_groups, 0)
            masses, chunk = mass_RG2 + 2 * row_id * num_groups, tl.arange(0, CHUNKS)
            total = tl.sum(tl.load(masses + 2 * chunk, mask=chunk < num_weighed, other=0), 0)
            first = tl.sum(tl.load(masses + 2 * chunk + 1, mask=chunk < num_weighed, other=0), 0)
            size = tl.load(count_R + row_id)
            listed = size
            low, top = tl.load(found_R2 + 2 * row_id), tl.load(found_R2 + 2 * row_id + 1)
            values, ids = value_RN + row_id.to(tl.int64) * capacity, id_RN + row_id.to(tl.int64) * capacity
            if size > capacity:
                values = row
                size = V
                listed = 0
                low = -float("inf")
            seed, position = tl.load(seed_R + row_id), tl.load(position_R + row_id)
            token = _choose_listed(
                row, values, ids, listed, size, token, temperature, seed, position, top_k, top_p, min_p,
                total, first, low, top, STEP, PIVOTS,
            )  # fmt: skip
    tl.store(token_R + row_id, tl.where(token == NO_TOKEN, NONE_ALLOWED, token).to(tl.int64))


# Launches


class Split(NamedTuple):
    """How rows are divided among programs: tiles of a row, tiles of a program, programs of a row."""

    num_tiles: int
    tiles: int
    num_chunks: int


def choose_split(num_rows: int, vocabulary: int, tile: int, num_programs: int) -> Split:
    num_tiles = cdiv(vocabulary, tile)
    tiles = cdiv(num_tiles, max(1, min(num_programs // num_rows, MAX_CHUNKS, num_tiles)))
    return Split(num_tiles, tiles, cdiv(num_tiles, tiles))


def accepts(call: SampleCall) -> bool:
    logits_RV = call.logits_RV
    return (
        logits_RV.dtype in FLOATS
        and logits_RV.stride(1) == 1
        and 1 <= logits_RV.shape[1] <= MAX_VOCABULARY
        and all(vector is None or vector.is_contiguous() for vector in call[1:])
    )


@ops.sample.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def sample(call: SampleCall) -> torch.Tensor:
    logits_RV, temperature_R, seed_R, position_R = call[:4]
    truncation = None if call.top_k_R is None else call[4:]
    (num_rows, vocabulary), device = logits_RV.shape, logits_RV.device
    token_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    if num_rows == 0:
        return token_R
    scan = choose_split(num_rows, vocabulary, TILE, NUM_SCANNING)
    gather = choose_split(num_rows, vocabulary, GATHER_TILE, NUM_GATHERING)
    num_stretches, capacity = cdiv(vocabulary, STRETCH), min(vocabulary, max(LIST, PLACES // num_rows))

    def scratch(columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_rows, columns, dtype=dtype, device=device)

    drawn = scratch(scan.num_chunks), scratch(scan.num_chunks, torch.int32)
    peak_RS = count_R = None
    lists: tuple[torch.Tensor | None, ...] = (None,) * 4
    if truncation is not None:
        peak_RS, count_R = scratch(num_stretches), scratch(1, torch.int32)
        masses = scratch(2 * gather.num_chunks, torch.int64)
        lists = scratch(capacity, logits_RV.dtype), scratch(capacity, torch.int32), scratch(2), masses
    options = {**launch_options(device), **EXACT}
    row = vocabulary, logits_RV.stride(0)
    scan_kernel[(num_rows, scan.num_chunks)](
        logits_RV, temperature_R, seed_R, position_R, *drawn, peak_RS, count_R, *row, scan.num_tiles, scan.tiles,
        TILE=TILE, STRETCH=STRETCH, num_warps=SCAN_WARPS, **options,
    )  # fmt: skip
    if truncation is not None:
        gather_kernel[(num_rows, gather.num_chunks)](
            logits_RV, temperature_R, *truncation, *drawn, peak_RS, count_R, *lists, *row,
            scan.num_chunks, gather.num_tiles, gather.tiles, capacity,
            TILE=GATHER_TILE, STRETCH=STRETCH, STRETCHES=next_power_of_2(num_stretches), CHUNKS=MAX_CHUNKS,
            STEP=STEP, PIVOTS=PIVOTS, num_warps=GATHER_WARPS, **options,
        )  # fmt: skip
    choose_kernel[(num_rows,)](
        logits_RV, temperature_R, *(truncation or (None,) * 3), seed_R, position_R, *drawn, count_R, *lists, token_R,
        *row, scan.num_chunks, gather.num_chunks, capacity,
        CHUNKS=MAX_CHUNKS, STEP=STEP, PIVOTS=PIVOTS, num_warps=CHOOSE_WARPS if truncation else 1, **options,
    )  # fmt: skip
    return token_R
