"""The usual router: a softmax over all experts and its winners in one operator.

Which of equal experts comes first is the chip's choice; the op says the lowest id. T tokens, E experts, K per token.
"""

from __future__ import annotations

import torch
import torch_npu

from anabranch import ops

MOST_WINNERS = 1024


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
    plain = score == "softmax" and select_bias_E is None and num_groups == 1
    return plain and top_k <= MOST_WINNERS and logits_TE.shape[0] > 0


@ops.route.kernel("torch_npu", on=("npu",), accepts=accepts)
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
    weight_TK, expert_TK, _ = torch_npu.npu_moe_gating_top_k_softmax(logits_TE.float(), None, top_k)
    if renormalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    # A row without any finite logit has no probabilities: it weighs nothing.
    weight_TK = torch.nan_to_num(weight_TK, nan=0.0) * scaling
    if expert_scale_E is not None:
        weight_TK = weight_TK * expert_scale_E.float()[expert_TK.long()]
    if num_tokens is not None:
        padding_T1 = (torch.arange(logits_TE.shape[0], device=logits_TE.device) >= num_tokens)[:, None]
        expert_TK = expert_TK.masked_fill(padding_T1, -1)
        weight_TK = weight_TK.masked_fill(padding_T1, 0.0)
    return weight_TK, expert_TK
