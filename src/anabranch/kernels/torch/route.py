"""The usual router in few calls: a softmax, the winners by a stable sort, renormalised or not. T tokens, E experts."""

from __future__ import annotations

import torch

from anabranch import ops


def accepts(
    logits_TE: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    select_bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling: float = 1.0,
    expert_scale_E: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> bool:
    return score == "softmax" and select_bias_E is None and num_groups == 1 and num_tokens is None


@ops.route.kernel("torch", on=("cpu", "fake"), accepts=accepts)
def route(
    logits_TE: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    select_bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling: float = 1.0,
    expert_scale_E: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # −0.0 + 0.0 is 0.0, so that the two tie; minus infinity becomes a number, so that a row of it has no NaN.
    logits_TE = (logits_TE.float() + 0.0).clamp(min=-3e38)
    value_TK, expert_TK = (x[:, :top_k] for x in torch.sort(logits_TE, dim=-1, descending=True, stable=True))
    weight_TK = value_TK.softmax(-1) if renormalize else logits_TE.softmax(-1).gather(-1, expert_TK)
    weight_TK = weight_TK.masked_fill_(value_TK <= -3e38, 0.0)
    if scaling != 1.0:
        weight_TK = weight_TK * scaling
    if expert_scale_E is not None:
        weight_TK = weight_TK * expert_scale_E.float()[expert_TK]
    return weight_TK, expert_TK.int()
