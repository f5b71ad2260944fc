"""Weights that a product will read soon are fetched into L2 by a kernel that leaves memory idle.

Between two large products a decode step spends most of its time in kernels too small to keep memory busy. Hopper takes
a request for kilobytes in one instruction and nobody waits for it, so such a kernel can ask for the weights behind it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = tl.constexpr(4096)
"""Bytes of a request."""
LANES = tl.constexpr(256)
"""As many as a program has threads, or more: with fewer, several would ask for the same."""
MOST_TOKENS = 512
"""Beyond, products are not bound by reading weights."""


def soon_arguments(soon: torch.Tensor | None, num_tokens: int, hopper: bool) -> tuple[torch.Tensor | None, int]:
    """What a kernel hands on to `fetch_soon`: weights or None, their chunks."""
    if soon is None or not hopper or num_tokens > MOST_TOKENS or not soon.is_contiguous():
        return None, 0
    return soon, soon.nbytes // CHUNK.value


@triton.jit
def fetch_soon(weight, num_chunks, program, num_programs):
    """Each program asks for its share."""
    STEP: tl.constexpr = CHUNK * 8 // weight.dtype.element_ty.primitive_bitwidth
    lane = program * LANES + tl.arange(0, LANES)
    for first in range(0, num_chunks, num_programs * LANES):
        chunk = first + lane
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 4096; mov.u32 $0, 0; }",
            "=r,l,r",
            [weight + chunk.to(tl.int64) * STEP, (chunk < num_chunks).to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
