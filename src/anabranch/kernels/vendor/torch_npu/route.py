"""The usual router: a softmax over all experts and its winners in one operator.

Which of equal experts comes first is the chip's choice; the op says the lowest id. T tokens, E experts, K per token.
"""

import torch
import torch_npu

from anabranch import ops
from anabranch.ops.route import RouteCall

MOST_WINNERS = 1024


def accepts(call: RouteCall) -> bool:
    plain = call.score == "softmax" and call.select_bias_E is None and call.num_groups == 1
    return plain and call.top_k <= MOST_WINNERS and call.logits_TE.shape[0] > 0


@ops.route.kernel("torch_npu", on=("npu",), accepts=accepts)
def route(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    weight_TK, expert_TK, _ = torch_npu.npu_moe_gating_top_k_softmax(call.logits_TE.float(), None, call.top_k)
    if call.renormalize:
        weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    # A row without any finite logit has no probabilities: it weighs nothing.
    weight_TK = torch.nan_to_num(weight_TK, nan=0.0) * call.scaling
    if call.expert_scale_E is not None:
        weight_TK = weight_TK * call.expert_scale_E.float()[expert_TK.long()]
    if call.num_tokens is not None:
        padding_T1 = (torch.arange(expert_TK.shape[0], device=expert_TK.device) >= call.num_tokens)[:, None]
        expert_TK = expert_TK.masked_fill(padding_T1, -1)
        weight_TK = weight_TK.masked_fill(padding_T1, 0.0)
    return weight_TK, expert_TK
