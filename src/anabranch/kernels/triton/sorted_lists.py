"""Sorted lists inside a kernel: tuples of tensors, the largest first, compared element by element.

R rows of a program, L lanes that share a row; lists have 2^LOG elements. All are sorting networks: no branches, and no
loop over the elements to find.
"""

# Tuples in Triton may change their length:
# mypy: disable-error-code="assignment, misc"

import triton
import triton.language as tl


@triton.jit
def exchange(keys, A: tl.constexpr, B: tl.constexpr):
    """Puts the larger of two elements at A and the smaller at B > A."""
    larger, smaller = tl.maximum(keys[A], keys[B]), tl.minimum(keys[A], keys[B])
    return keys[:A] + (larger,) + keys[A + 1 : B] + (smaller,) + keys[B + 1 :]


@triton.jit
def odd_even(keys, N: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr):
    for i in tl.static_range(N - D):
        if (i >= D % BLOCK) and ((i - D % BLOCK) % (2 * D) < D) and (i // (2 * BLOCK) == (i + D) // (2 * BLOCK)):
            keys = exchange(keys, i, i + D)
    return keys


@triton.jit
def sort(keys, LOG: tl.constexpr):
    """2^LOG keys by Batcher's odd-even merge sort: 1, 5, 19, 63 exchanges for 2, 4, 8, 16 keys."""
    for p in tl.static_range(LOG):
        for q in tl.static_range(p + 1):
            keys = odd_even(keys, 1 << LOG, 1 << p, (1 << p) >> q)
    return keys


@triton.jit
def merge(a, b, LOG: tl.constexpr):
    """The best 2^LOG of two sorted lists: the larger of each pair (first of one, last of the other), sorted again."""
    N: tl.constexpr = 1 << LOG
    best = ()
    for i in tl.static_range(N):
        best = best + (tl.maximum(a[i], b[N - 1 - i]),)
    for s in tl.static_range(LOG):
        for i in tl.static_range(N):
            if i & (N >> (s + 1)) == 0:
                best = exchange(best, i, i + (N >> (s + 1)))
    return best


@triton.jit
def merge2(a0, a1, b0, b1):
    return merge((a0, a1), (b0, b1), 1)


@triton.jit
def merge4(a0, a1, a2, a3, b0, b1, b2, b3):
    return merge((a0, a1, a2, a3), (b0, b1, b2, b3), 2)


@triton.jit
def merge8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return merge((a0, a1, a2, a3, a4, a5, a6, a7), (b0, b1, b2, b3, b4, b5, b6, b7), 3)


@triton.jit
def merge16(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab, ac, ad, ae, af,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, ba, bb, bc, bd, be, bf,
):  # fmt: skip
    a = (a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, aa, ab, ac, ad, ae, af)
    b = (b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, ba, bb, bc, bd, be, bf)
    return merge(a, b, 4)


@triton.jit
def merge_lanes(lists, LOG: tl.constexpr):
    """The lists of each row's lanes [R, L] → one list per row [R]."""
    if LOG == 0:
        return (tl.max(lists[0], 1),)
    else:
        return tl.reduce(lists, 1, merge2 if LOG == 1 else merge4 if LOG == 2 else merge8 if LOG == 3 else merge16)


@triton.jit
def unpack(x_RLV, LOG: tl.constexpr):
    """[R, L, 2^LOG] → 2^LOG tensors [R, L]."""
    parts = (x_RLV,)
    for level in tl.static_range(LOG):
        halves = ()
        for i in tl.static_range(1 << level):
            x = parts[i]
            halves = halves + tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
        parts = halves
    flat = ()
    for i in tl.static_range(1 << LOG):
        x = parts[i]
        flat = flat + (tl.reshape(x, (x.shape[0], x.shape[1])),)
    return flat


@triton.jit
def pack(keys, LOG: tl.constexpr):
    """2^LOG tensors [R] → [R, 2^LOG]."""
    for level in tl.static_range(LOG):
        # The last dimension varies fastest, so it must join neighbours: (0 4) (1 5) .. then ((0 4) (2 6)) .. backwards.
        joined = ()
        for i in tl.static_range(1 << (LOG - level - 1)):
            joined = joined + (tl.join(keys[i], keys[i + (1 << (LOG - level - 1))]),)
        keys = joined
    return tl.reshape(keys[0], (keys[0].shape[0], 1 << LOG))


@triton.jit
def best_of(keys, LOG: tl.constexpr):
    """The row's best 2^LOG keys, a sorted list [R]."""
    best = sort(keys[: 1 << LOG], LOG)
    for i in tl.static_range(1, len(keys) >> LOG):
        best = merge(best, sort(keys[i << LOG : (i + 1) << LOG], LOG), LOG)
    return merge_lanes(best, LOG)
