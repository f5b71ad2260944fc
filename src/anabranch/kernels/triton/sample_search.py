"""Ranks and masses of listed tokens, and the k-th largest of many logits. Parts of sample.py's kernels.

N tokens, P pivots.

`values` and `ids` are a list of `size` tokens; where `listed` is 0, `values` is the row of logits and a token's index
is its id. Values have any float dtype and are converted to fp32 when loaded. Logits are compared as floats; the search
for one uses keys, integers in the same order: each pass over the tokens compares them with P pivots and keeps
1 / (P + 1) of the interval.
"""

import triton
import triton.language as tl

from anabranch.kernels.triton.exact import mass

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def to_key(x):
    """int32 keys in the order of the floats; −0.0 and 0.0 have the same key."""
    bits = x.to(tl.int32, bitcast=True)
    sign = bits >> 31
    return ((bits & 0x7FFFFFFF) ^ sign) - sign


@triton.jit
def from_key(key):
    key = key.to(tl.int32)
    return tl.where(key < 0, LOWEST - key, key).to(tl.float32, bitcast=True)


@triton.jit
def pivots(low, high, PIVOTS: tl.constexpr):
    """Keys that divide the interval above low."""
    step = (high - low + PIVOTS) // (PIVOTS + 1)
    return tl.minimum(low + step * (1 + tl.arange(0, PIVOTS)), high)


@triton.jit
def narrow(low, high, goal, key_P, sum_P):
    """[low, high] around the largest key whose sum reaches the goal; sums decrease as keys increase."""
    reached_P = sum_P >= goal
    return tl.max(tl.where(reached_P, key_P, low), 0), tl.min(tl.where(reached_P, high, key_P - 1), 0)


@triton.jit
def load_step(values, ids, listed, start, size, STEP: tl.constexpr):
    """(whether it exists, id, value) of a part of the list."""
    i = start + tl.arange(0, STEP)
    id = tl.load(ids + i, mask=i < listed, other=0)
    value = tl.load(values + i, mask=i < size, other=float("-inf")).to(tl.float32)
    return i < size, tl.where(i < listed, id, i), value


@triton.jit
def kth_largest(values, size, k, low, high, STEP: tl.constexpr, PIVOTS: tl.constexpr):
    """The key of the k-th largest value of a list; low if there are fewer."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        key_P = pivots(low, high, PIVOTS)
        count_P = tl.zeros(key_P.shape, tl.int32)
        for start in range(0, size, STEP):
            i = start + tl.arange(0, STEP)
            value = tl.load(values + i, mask=i < size, other=float("-inf")).to(tl.float32)
            count_P += tl.sum((value[None, :] >= from_key(key_P)[:, None]).to(tl.int32), 1)
        low, high = narrow(low, high, k, key_P, count_P)
    return low


@triton.jit
def is_before(there, id, value, token, logit):
    """Which tokens are ranked before this one."""
    return there & ((value > logit) | ((value == logit) & (id < token)))


@triton.jit
def before(values, ids, listed, size, token, logit, scale, top, STEP: tl.constexpr):
    """(number, mass) of the tokens ranked before this one."""
    number, weight = tl.zeros((STEP,), tl.int32), tl.zeros((STEP,), tl.int64)
    for start in range(0, size, STEP):
        there, id, value = load_step(values, ids, listed, start, size, STEP)
        first = is_before(there, id, value, token, logit)
        number += first.to(tl.int32)
        weight += tl.where(first, mass(value * scale - top * scale), 0)
    return tl.sum(number, 0), tl.sum(weight, 0)
