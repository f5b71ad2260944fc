"""Parts of kernels that stream rows of weights through registers, one product at a time.

T tokens, F outputs; a program has R · W outputs, W of them in a tile.
"""

# Tuples in Triton may change their length:
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl

from anabranch.kernels.triton.sorted_lists import pack


@triton.jit
def load_inside(row, d, c: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, EVICT: tl.constexpr):
    """Elements c · STEP + d of rows; zeros beyond the last."""
    if (c + 1) * STEP <= D:
        return tl.load(row + (c * STEP + d), eviction_policy=EVICT)
    else:
        return tl.load(row + (c * STEP + d), mask=c * STEP + d < D, other=0.0, eviction_policy=EVICT)


@triton.jit
def add_to(sums, I: tl.constexpr, value):
    return sums[:I] + (sums[I] + value,) + sums[I + 1 :]


@triton.jit
def store_sums(
    sums, bias, y_TF, first, num_outputs, T: tl.constexpr, R: tl.constexpr, W: tl.constexpr, LOG: tl.constexpr
):
    """Sums [W, lanes] of token t and tile r at t · R + r, over their lanes; a bias for each tile, or none. 2^LOG ≥
    T · R."""
    y = ()
    for i in tl.static_range(1 << LOG):
        y_W = tl.sum(sums[i % (T * R)], 1)
        if len(bias) > 0:
            y_W += bias[i % R]
        y = y + (y_W,)
    # One store for all: each takes a way through shared memory.
    y_WN = pack(y, LOG)
    n = tl.arange(0, 1 << LOG)[None, :]
    output = first + n % R * W + tl.arange(0, W)[:, None]
    is_output = (n < T * R) & (output < num_outputs)
    tl.store(y_TF + (n // R * num_outputs + output), y_WN.to(y_TF.dtype.element_ty), mask=is_output)
