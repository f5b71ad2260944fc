"""Bring expert rows back to their tokens. T tokens, K experts per token, E experts, N = T · K rows, D width."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.op import Sample, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for reduce in (True, False):
        for tokens, top_k, kept in ((5, 2, 10), (4, 3, 8), (1, 1, 1), (0, 2, 0)):
            rows = torch.randn(tokens * top_k, 12, generator=generator)
            rows[kept:] = float("nan")  # rows without an expert are never read
            yield (
                f"T{tokens} K{top_k}, {kept} rows have an expert, reduce={reduce}",
                {
                    "rows_ND": rows.to(dtype),
                    "order_N": torch.randperm(tokens * top_k, generator=generator).int(),
                    "start_E": torch.tensor([0, kept // 2, kept], dtype=torch.int32),
                    "weight_TK": torch.rand(tokens, top_k, generator=generator),
                    "scaling": 1.5,
                    "reduce": reduce,
                },
            )


@op(samples=samples)
def combine(
    rows_ND: torch.Tensor,
    order_N: torch.Tensor,
    start_E: torch.Tensor,
    weight_TK: torch.Tensor,
    scaling: float = 1.0,
    reduce: bool = True,
) -> torch.Tensor:
    """y_TD[t] = scaling · Σ_k weight[t, k] · (the row of pair t · K + k), summed in fp32.

    `order_N` and `start_E` are expert_sort's. Pairs without an expert add nothing and zero nothing. With
    `reduce=False` the caller gets the weighted rows themselves, y_TKD.
    """
    num_rows = start_E[-1].item()
    pair = order_N[:num_rows].long()
    weighted = rows_ND[:num_rows].float() * weight_TK.flatten()[pair, None] * scaling
    tokens, top_k = weight_TK.shape
    y_ND = weighted.new_zeros(rows_ND.shape).index_copy(0, pair, weighted)
    y_TKD = y_ND.view(tokens, top_k, rows_ND.shape[1])
    return (y_TKD.sum(1) if reduce else y_TKD).to(rows_ND.dtype)
