"""Log probabilities, ranks and the best alternatives, without a sort and without a row of log probabilities.

T rows, V vocabulary, C chunks of a row, S stretches of a row, N alternatives.

One kernel reads each row once, with many programs per row: for each chunk the maximum, the sum of exponentials and the
number of tokens above the chosen one; for each stretch of 128 tokens the maximum. The other, one program per row,
combines the chunks and finds the best N one by one: the next one is in the stretch with the largest maximum, which is
read again.
"""

import torch
import triton
import triton.language as tl

from anabranch import ops
from anabranch.kernels.triton.launch import cdiv, launch_options, machine_of, next_power_of_2, wait_for_predecessor
from anabranch.kernels.triton.sample import MAX_CHUNKS, MAX_VOCABULARY, NUM_SCANNING, STRETCH, TILE, choose_split
from anabranch.kernels.triton.sample_search import LOWEST, from_key, to_key

MAX_TOP_N = 64
"""Each takes about a microsecond."""
NO_INDEX = tl.constexpr(1 << 30)


@triton.jit(do_not_specialize=["num_tiles", "tiles"], do_not_specialize_on_alignment=["token_T"])
def measure_kernel(
    logits, token_T, peak_TC, sum_TC, count_TC, peak_TS, V, stride, num_tiles, tiles,
    TILE: tl.constexpr, STRETCH: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program (row, chunk): `tiles` of the row's `num_tiles`."""
    wait_for_predecessor(DEPENDENT)
    t, chunk = tl.program_id(0), tl.program_id(1)
    row = logits + t.to(tl.int64) * stride
    chosen = tl.load(row + tl.load(token_T + t))
    top, total, count = -float("inf"), 0.0, 0
    num_stretches = (V + STRETCH - 1) // STRETCH
    for tile in range(chunk * tiles, tl.minimum(chunk * tiles + tiles, num_tiles)):
        stretch = tile * (TILE // STRETCH) + tl.arange(0, TILE // STRETCH)
        id = stretch[:, None] * STRETCH + tl.arange(0, STRETCH)[None, :]
        value = tl.load(row + id, mask=id < V, other=float("-inf"))
        peak = tl.max(value, 1)
        tl.store(peak_TS + t * num_stretches + stretch, peak, mask=stretch < num_stretches)
        high = tl.maximum(top, tl.max(peak, 0))
        if high > float("-inf"):
            total = total * tl.exp(top - high) + tl.sum(tl.exp(value - high))
            top = high
        count += tl.sum((value > chosen).to(tl.int32))
    place = t * tl.num_programs(1) + chunk
    tl.store(peak_TC + place, top)
    tl.store(sum_TC + place, total)
    tl.store(count_TC + place, count)


@triton.jit(do_not_specialize=["num_chunks", "N"], do_not_specialize_on_alignment=["token_T"])
def list_kernel(
    logits, token_T, peak_TC, sum_TC, count_TC, peak_TS, logprob_T, rank_T, top_id_TN, top_logprob_TN,
    V, stride, num_chunks, N,
    STRETCH: tl.constexpr, STRETCHES: tl.constexpr, CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    wait_for_predecessor(DEPENDENT)
    t = tl.program_id(0)
    row = logits + t.to(tl.int64) * stride
    chunk = tl.arange(0, CHUNKS)
    there = chunk < num_chunks
    peak = tl.load(peak_TC + t * num_chunks + chunk, mask=there, other=float("-inf"))
    top = tl.max(peak, 0)
    total = tl.load(sum_TC + t * num_chunks + chunk, mask=there, other=0.0)
    whole = top + tl.log(tl.sum(tl.where(peak > float("-inf"), total * tl.exp(peak - top), 0.0), 0))
    tl.store(logprob_T + t, tl.load(row + tl.load(token_T + t)) - whole)
    count = tl.load(count_TC + t * num_chunks + chunk, mask=there, other=0)
    tl.store(rank_T + t, 1 + tl.sum(count, 0).to(tl.int64))
    if N > 0:
        num_stretches = (V + STRETCH - 1) // STRETCH
        stretch = tl.arange(0, STRETCHES)
        left = to_key(tl.load(peak_TS + t * num_stretches + stretch, mask=stretch < num_stretches, other=float("-inf")))
        left = tl.where(stretch < num_stretches, left, LOWEST)
        last_key, last_id = tl.full((), 2147483647, tl.int32), tl.full((), -1, tl.int32)
        for n in range(N):
            # The first stretch with the largest remaining key; of its tokens, those after the last one found.
            its = tl.min(tl.where(left == tl.max(left, 0), stretch, NO_INDEX), 0)
            id = its * STRETCH + tl.arange(0, STRETCH)
            key = to_key(tl.load(row + id, mask=id < V, other=float("-inf")))
            after = (key < last_key) | ((key == last_key) & (id > last_id))
            key = tl.where(after & (id < V), key, LOWEST)
            last_key = tl.max(key, 0)
            last_id = tl.min(tl.where(key == last_key, id, NO_INDEX), 0)
            rest = tl.max(tl.where(id == last_id, LOWEST, key), 0)
            left = tl.where(stretch == its, rest, left)
            tl.store(top_id_TN + t * N + n, last_id.to(tl.int64))
            tl.store(top_logprob_TN + t * N + n, from_key(last_key) - whole)


def accepts(logits_TV: torch.Tensor, token_T: torch.Tensor, top_n: int) -> bool:
    vocabulary = logits_TV.shape[1]
    return (
        logits_TV.dtype == torch.float32
        and logits_TV.stride(1) == 1
        and token_T.is_contiguous()
        and 1 <= vocabulary <= MAX_VOCABULARY
        and top_n <= (vocabulary if machine_of(logits_TV.device).fixed else min(MAX_TOP_N, vocabulary))
    )


@ops.logprobs.kernel("triton", on=("cuda", "hip", "xpu"), accepts=accepts)
def logprobs(
    logits_TV: torch.Tensor, token_T: torch.Tensor, top_n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    (num_rows, vocabulary), device = logits_TV.shape, logits_TV.device
    logprob_T = torch.empty(num_rows, dtype=torch.float32, device=device)
    rank_T = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_id_TN = torch.empty(num_rows, top_n, dtype=torch.int64, device=device)
    top_logprob_TN = torch.empty(num_rows, top_n, dtype=torch.float32, device=device)
    results = logprob_T, rank_T, top_id_TN, top_logprob_TN
    if num_rows == 0:
        return results
    assumed_rows = 64 if machine_of(device).fixed else num_rows
    split = choose_split(assumed_rows, vocabulary, TILE, NUM_SCANNING)
    shape, num_stretches = (num_rows, split.num_chunks), cdiv(vocabulary, STRETCH)
    dtypes = torch.float32, torch.float32, torch.int32
    chunks = tuple(torch.empty(shape, dtype=dtype, device=device) for dtype in dtypes)
    peak_TS = torch.empty(num_rows, num_stretches, device=device)
    options = launch_options(device)
    row = vocabulary, logits_TV.stride(0)
    measure_kernel[shape](
        logits_TV, token_T, *chunks, peak_TS, *row, split.num_tiles, split.tiles,
        TILE=TILE, STRETCH=STRETCH, num_warps=4, **options,
    )  # fmt: skip
    list_kernel[(num_rows,)](
        logits_TV, token_T, *chunks, peak_TS, *results, *row, split.num_chunks, top_n,
        STRETCH=STRETCH, STRETCHES=next_power_of_2(num_stretches), CHUNKS=MAX_CHUNKS,
        num_warps=4, **options,
    )  # fmt: skip
    return results
