"""The usual router in few calls: a softmax, the winners by a stable sort, renormalised or not. T tokens, E experts."""

import torch

from anabranch import ops
from anabranch.ops.route import RouteCall


def accepts(call: RouteCall) -> bool:
    return call.score == "softmax" and call.select_bias_E is None and call.num_groups == 1 and call.num_tokens is None


@ops.route.kernel("torch", on=("cpu", "fake"), accepts=accepts)
def route(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    # −0.0 + 0.0 is 0.0, so that the two tie; minus infinity becomes a number, so that a row of it has no NaN.
    logits_TE = (call.logits_TE.float() + 0.0).clamp(min=-3e38)
    value_TK, expert_TK = (x[:, : call.top_k] for x in torch.sort(logits_TE, dim=-1, descending=True, stable=True))
    weight_TK = value_TK.softmax(-1) if call.renormalize else logits_TE.softmax(-1).gather(-1, expert_TK)
    weight_TK = weight_TK.masked_fill_(value_TK <= -3e38, 0.0)
    if call.scaling != 1.0:
        weight_TK = weight_TK * call.scaling
    if call.expert_scale_E is not None:
        weight_TK = weight_TK * call.expert_scale_E.float()[expert_TK]
    return weight_TK, expert_TK.int()
