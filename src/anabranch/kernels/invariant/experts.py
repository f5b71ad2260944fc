"""Experts on a CPU: each expert's rows as a product in blocks, a token's rows added in the order of its experts' ids.

T tokens, D hidden width, K experts per token, E experts, N = T · K pairs.
"""

import torch

from anabranch import ops
from anabranch.kernels.invariant import in_c
from anabranch.kernels.invariant.linear import product
from anabranch.kernels.torch.experts import sort_pairs
from anabranch.ops.experts import ExpertsCall


@ops.experts.kernel("invariant", on=("cpu", "fake"), traits=in_c.TRAITS)
def experts(call: ExpertsCall) -> torch.Tensor:
    if (found := in_c.combined(call)) is not None:
        return found
    x_TD, (tokens, top_k) = call.x_TD, call.expert_TK.shape
    gate_up_EFD, down_EDI = call.gate_up_EFD.dense(x_TD.dtype), call.down_EDI.dense(x_TD.dtype)
    order_N, spans = sort_pairs(call.expert_TK.flatten(), gate_up_EFD.shape[0])
    token_N = order_N // top_k
    h_NF = _products(x_TD[token_N], gate_up_EFD, call.gate_up_bias_EF, spans)
    rows_ND = _products(ops.gated_activation(h_NF, call.activation), down_EDI, call.down_bias_ED, spans)
    rows_ND = rows_ND * (call.weight_TK.flatten()[order_N, None] * call.scaling)
    if call.combined:  # on a CPU one pair after the other
        y_TD = torch.zeros(tokens, x_TD.shape[1]).index_add_(0, token_N, rows_ND)
        return y_TD.to(x_TD.dtype)
    y_ND = torch.zeros(tokens * top_k, x_TD.shape[1]).index_copy_(0, order_N, rows_ND)
    return y_ND.view(tokens, top_k, x_TD.shape[1]).to(x_TD.dtype)


def _products(
    x_ND: torch.Tensor, weight_EFD: torch.Tensor, bias_EF: torch.Tensor | None, spans: list[tuple[int, slice]]
) -> torch.Tensor:
    """Each expert's rows times its weight."""
    parts = [product(x_ND[rows], weight_EFD[e].mT) for e, rows in spans]
    if bias_EF is not None:
        parts = [part + bias_EF[e] for part, (e, _) in zip(parts, spans, strict=True)]
    return torch.cat(parts) if parts else x_ND.new_empty(0, weight_EFD.shape[1])
