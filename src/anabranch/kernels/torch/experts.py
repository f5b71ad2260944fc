"""Experts on a CPU: sort the tokens by expert and touch only the experts that were hit.

T tokens, D hidden width, K experts per token, E experts, I expert width, N = T · K pairs.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from anabranch import ops


@ops.experts.kernel("torch")
def experts(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    gate_up_EFD: torch.Tensor,
    down_EDI: torch.Tensor,
    activation: str,
    gate_up_bias_EF: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    scaling: float = 1.0,
    combined: bool = True,
) -> torch.Tensor:
    order_N, start_E = ops.expert_sort(expert_TK, gate_up_EFD.shape[0])
    starts = start_E.tolist()
    x_ND = x_TD[order_N.long() // expert_TK.shape[1]]
    rows_ND = x_TD.new_empty(order_N.shape[0], x_TD.shape[1])
    for e, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        h = F.linear(x_ND[begin:end], gate_up_EFD[e], None if gate_up_bias_EF is None else gate_up_bias_EF[e])
        h = ops.gated_activation(h, activation)
        rows_ND[begin:end] = F.linear(h, down_EDI[e], None if down_bias_ED is None else down_bias_ED[e])
    return ops.combine(rows_ND, order_N, start_E, weight_TK, scaling, combined)
