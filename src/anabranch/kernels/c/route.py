"""The usual router: a softmax and its winners. T tokens, E experts, K of them for each token."""

import torch

from anabranch import ops
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain
from anabranch.ops.route import RouteCall

compute = function("route")


def accepts(call: RouteCall) -> bool:
    return call.logits_TE.shape[0] <= MAX_ROWS and fits(call)


def fits(call: RouteCall) -> bool:
    plain = call.score == "softmax" and call.select_bias_E is None and call.expert_scale_E is None
    whole = call.num_groups == 1 and call.num_tokens is None
    return plain and whole and is_plain(call.logits_TE)


@ops.route.kernel("c", on=("cpu",), accepts=accepts)
def route(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TE, top_k = call.logits_TE, call.top_k
    tokens, num_experts = logits_TE.shape
    weight_TK = logits_TE.new_empty(tokens, top_k)
    expert_TK = logits_TE.new_empty(tokens, top_k, dtype=torch.int32)
    pointers = weight_TK.data_ptr(), expert_TK.data_ptr(), logits_TE.data_ptr()
    compute(*pointers, tokens, num_experts, top_k, call.renormalize, call.scaling)
    return weight_TK, expert_TK
