"""Write new keys and values into their pages.

T tokens, P pages, S slots in a page, G key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.op import Sample, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for tokens, pages, page_size, heads, dim in ((5, 4, 4, 2, 8), (1, 2, 16, 1, 32), (0, 2, 4, 1, 8)):
        slot = torch.randperm(pages * page_size, generator=generator)[:tokens]
        slot[1::3] = -1
        cache = torch.randn(2, pages, page_size, heads, dim, generator=generator).to(dtype)
        yield (
            f"T{tokens} P{pages} S{page_size} G{heads} D{dim}",
            {
                # Strided, as slices of a packed projection are.
                "k_TGD": torch.randn(tokens, 2 * heads, dim, generator=generator).to(dtype)[:, :heads],
                "v_TGD": torch.randn(tokens, 3 * heads, dim, generator=generator).to(dtype)[:, heads : 2 * heads],
                "k_PSGD": cache[0].clone(),
                "v_PSGD": cache[1].clone(),
                "slot_T": slot,
            },
        )


@op(samples=samples, mutates=("k_PSGD", "v_PSGD"))
def kv_store(
    k_TGD: torch.Tensor, v_TGD: torch.Tensor, k_PSGD: torch.Tensor, v_PSGD: torch.Tensor, slot_T: torch.Tensor
) -> None:
    """Token t goes to slot `slot_T[t]` = page · S + offset; −1 (a padding row) is written nowhere."""
    kept = slot_T >= 0
    slot = slot_T[kept].long()
    page, offset = slot // k_PSGD.shape[1], slot % k_PSGD.shape[1]
    k_PSGD[page, offset] = k_TGD[kept]
    v_PSGD[page, offset] = v_TGD[kept]
