"""The experts' feed-forward: rows in expert order, two grouped products with the activation between, rows back.

Rows are summed by the last operator in a fixed order, so every `combine` is this one.

T tokens, D hidden width, K experts per token, E experts, I expert width, F = 2 · I, N = T · K rows.
"""

import torch
import torch_npu

from anabranch import ops
from anabranch.formats import PLAIN
from anabranch.ops.experts import ExpertsCall

COUNTS = 1
"""Of the operators' `..._type`: how many rows each expert has, not where they end."""
ROWS_ALONG_M, ONE_OUTPUT = 0, 2
"""Of `group_type` and `split_item`: groups are of rows, and stay in one tensor."""
BY_TOKEN = 2
"""Of `drop_pad_mode`: the place of pair t · K + k is entry t · K + k; nothing is dropped."""
ALIGNMENT = 16


def accepts(call: ExpertsCall) -> bool:
    x_TD, gate_up, down = call.x_TD, call.gate_up_EFD, call.down_EDI
    plain = gate_up.format is PLAIN and down.format is PLAIN
    half = x_TD.dtype in (torch.float16, torch.bfloat16) and plain and gate_up.dtype == down.dtype == x_TD.dtype
    aligned = not any(size % ALIGNMENT for size in down.shape[1:])
    return half and aligned and call.gate_up_bias_EF is None and call.down_bias_ED is None and x_TD.shape[0] > 0


@ops.experts.kernel("torch_npu", on=("npu",), accepts=accepts)
def experts(call: ExpertsCall) -> torch.Tensor:
    x_TD, expert_TK = call.x_TD, call.expert_TK
    (tokens, top_k), num_experts = expert_TK.shape, call.down_EDI.shape[0]
    # A pair without an expert visits the first one and weighs nothing: rows left out would be -1 in place_N, which the
    # last operator does not take.
    weight_TK = torch.where(expert_TK < 0, 0.0, call.weight_TK * call.scaling)
    rows_ND, place_N, count_E, _ = torch_npu.npu_moe_init_routing_v2(
        x_TD,
        expert_TK.clamp(min=0),
        active_num=tokens * top_k,
        expert_num=num_experts,
        expert_tokens_num_type=COUNTS,
        expert_tokens_num_flag=True,
        active_expert_range=[0, num_experts],
        quant_mode=-1,
        row_idx_type=0,
    )
    h_NF = _products(rows_ND, call.gate_up_EFD.data, count_E)
    rows_ND = _products(ops.gated_activation(h_NF, call.activation), call.down_EDI.data, count_E)
    if not call.combined:
        y_TKD = rows_ND.index_select(0, place_N).view(tokens, top_k, -1)
        return (y_TKD.float() * weight_TK[..., None]).to(x_TD.dtype)
    weight_TK = weight_TK.to(x_TD.dtype)
    return torch_npu.npu_moe_finalize_routing(
        rows_ND, None, None, None, weight_TK, place_N, None, drop_pad_mode=BY_TOKEN
    )


def _products(x_ND: torch.Tensor, weight_EFD: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    """Each expert's rows times its weight. The loader keeps weights as [E, D, F] in memory (Platform.lay_out), so the
    transposition copies nothing."""
    return torch_npu.npu_grouped_matmul(
        [x_ND],
        [weight_EFD.transpose(1, 2)],
        group_list=count_E,
        split_item=ONE_OUTPUT,
        group_type=ROWS_ALONG_M,
        group_list_type=COUNTS,
    )[0]
