"""Kernels for `--deterministic` on a CPU: what a row gives depends on that row alone, to the bit, not on which and how
many others are computed with it. `kernels.bind` chooses them wherever they exist.

In fp32 most of it is done by the kernels in C, where there is a compiler: see `in_c`. What follows is about the rest.

What torch and its libraries make of a row depends on the number of rows in three places. Products and fused attention
choose code by shape: `blocks` calls them with a few shapes only, which are compared on this machine before they are
used. Loops over elements compute what is left after whole vectors by other code: see `elementwise`. Chunks of the gated
delta net begin where a step begins: `gated_delta` takes token by token. The other ops compute each row by itself.
"""

from anabranch.kernels.invariant import attention, elementwise, experts, gated_delta, in_c, linear

__all__ = ["attention", "elementwise", "experts", "gated_delta", "in_c", "linear"]
