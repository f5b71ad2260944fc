"""Experts on a CPU: sort the tokens by expert and touch only the experts that were hit.

T tokens, D hidden width, K experts per token, E experts, I expert width, N = T · K pairs.
"""

from itertools import accumulate

import torch

from anabranch import ops
from anabranch.formats import BF16, PLAIN
from anabranch.ops.experts import ExpertsCall


def accepts(call: ExpertsCall) -> bool:
    return all(weight.format in (PLAIN, BF16) for weight in (call.gate_up_EFD, call.down_EDI))


@ops.experts.kernel("torch", accepts=accepts)
def experts(call: ExpertsCall) -> torch.Tensor:
    x_TD, gate_up_EFD, down_EDI = call.x_TD, call.gate_up_EFD.data, call.down_EDI.data
    tokens, top_k = call.expert_TK.shape
    biased = call.gate_up_bias_EF is not None or call.down_bias_ED is not None
    if tokens == 1 and call.combined and not biased and gate_up_EFD.dtype == x_TD.dtype == torch.float32:
        return _one_token(call, gate_up_EFD, down_EDI)
    order_N, spans = sort_pairs(call.expert_TK.flatten(), gate_up_EFD.shape[0])
    token_N = order_N // top_k
    x_ND = x_TD.expand(order_N.shape[0], -1) if tokens == 1 else x_TD[token_N]
    h_NF = _products(x_ND, gate_up_EFD, call.gate_up_bias_EF, spans)
    rows_ND = _products(ops.gated_activation(h_NF, call.activation), down_EDI, call.down_bias_ED, spans)
    weighted_ND = rows_ND * (call.weight_TK.flatten()[order_N, None] * call.scaling)
    if call.combined and call.combine in ("fastest", "fused"):
        y_TD = torch.zeros(tokens, x_TD.shape[1], device=x_TD.device)
        return y_TD.index_add_(0, token_N, weighted_ND).to(x_TD.dtype)
    # A row for every pair: on a GPU index_add_ adds in any order.
    y_ND = torch.zeros(tokens * top_k, x_TD.shape[1], device=x_TD.device).index_copy_(0, order_N, weighted_ND)
    y_TKD = y_ND.view(tokens, top_k, x_TD.shape[1])
    return (y_TKD.sum(1) if call.combined else y_TKD).to(x_TD.dtype)


def sort_pairs(expert_N: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[tuple[int, slice]]]:
    """The pairs that have an expert, sorted by it, and where among them those of each expert are that has some."""
    # Pairs without an expert (−1) come first.
    counts = torch.bincount(expert_N + 1, minlength=num_experts + 1).tolist()
    ends = [end - counts[0] for end in accumulate(counts)]
    spans = [(e, slice(ends[e], ends[e + 1])) for e, count in enumerate(counts[1:]) if count]
    return torch.sort(expert_N, stable=True).indices[counts[0] :], spans


def _one_token(call: ExpertsCall, gate_up_EFD: torch.Tensor, down_EDI: torch.Tensor) -> torch.Tensor:
    """Nothing to sort: each expert's result is added to the row where it is computed."""
    x_D, experts = call.x_TD[0], call.expert_TK.tolist()[0]
    h_KF = x_D.new_empty(len(experts), gate_up_EFD.shape[1])
    for k, e in enumerate(experts):
        torch.mv(gate_up_EFD[e], x_D, out=h_KF[k])
    h_KI = ops.gated_activation(h_KF, call.activation) * (call.weight_TK[0, :, None] * call.scaling)
    y_D = torch.zeros_like(x_D)
    for k, e in enumerate(experts):
        if e >= 0:
            y_D.addmv_(down_EDI[e], h_KI[k])
    return y_D[None]


def _products(
    x_ND: torch.Tensor, weight_EFD: torch.Tensor, bias_EF: torch.Tensor | None, spans: list[tuple[int, slice]]
) -> torch.Tensor:
    """Each expert's rows times its weight, into one tensor."""
    y_NF = x_ND.new_empty(x_ND.shape[0], weight_EFD.shape[1])
    for e, rows in spans:
        torch.mm(x_ND[rows], weight_EFD[e].to(x_ND.dtype).T, out=y_NF[rows])
        if bias_EF is not None:
            y_NF[rows] += bias_EF[e]
    return y_NF
