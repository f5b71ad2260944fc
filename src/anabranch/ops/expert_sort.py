"""Bring (token, slot) pairs into expert order. T tokens, K experts per token, E experts, N = T · K pairs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.op import Sample, op


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for label, tokens, top_k, num_experts in (
        ("", 7, 2, 5),
        ("E=60", 33, 4, 60),
        ("one token", 1, 8, 128),
        ("none", 0, 2, 4),
    ):
        scores = torch.rand(tokens, num_experts, generator=generator)
        expert = scores.argsort(-1)[:, :top_k].int()
        if tokens > 2:
            expert[2:4] = -1
        yield f"{label} T{tokens} K{top_k} E{num_experts}".strip(), {"expert_TK": expert, "num_experts": num_experts}
    same = torch.full((6, 1), 3, dtype=torch.int32)
    yield "all tokens to one expert", {"expert_TK": same, "num_experts": 4}


@op(samples=samples)
def expert_sort(expert_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order_N, start_E), both int32.

    order_N lists the pairs t · K + k by expert, and by t within an expert; pairs without an expert (id −1) come last.
    Expert e owns order_N[start_E[e] : start_E[e + 1]] (start_E has E + 1 entries; the last is the number of pairs
    that have an expert).
    """
    expert_N = expert_TK.flatten().long()
    expert_N = torch.where(expert_N < 0, num_experts, expert_N)
    order_N = torch.sort(expert_N, stable=True).indices
    count = torch.bincount(expert_N, minlength=num_experts + 1)[:num_experts]
    start_E = torch.cat([count.new_zeros(1), count.cumsum(0)])
    return order_N.int(), start_E.int()
