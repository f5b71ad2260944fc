"""Experts of few tokens: each weight that is hit is read once, where it is.

T tokens, D hidden width, K experts per token, E experts, I expert width.
"""

import torch

from anabranch import ops
from anabranch.formats import BF16, PLAIN
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain
from anabranch.ops.experts import ExpertsCall

compute = function("experts")

TOKENS = 256
"""Of one call: the kernel has tables of them on its stack."""


def accepts(call: ExpertsCall) -> bool:
    """Whether the kernel computes this call: of any number of tokens where weights are bf16."""
    most = MAX_ROWS if call.down_EDI.format is PLAIN else call.x_TD.shape[0]
    return 0 < call.x_TD.shape[0] <= most and fits(call)


def fits(call: ExpertsCall) -> bool:
    """Whether it does but for the number of tokens."""
    gate_up, down = call.gate_up_EFD, call.down_EDI
    if not (call.combined and call.activation == "silu"):
        return False
    biased = call.gate_up_bias_EF is not None or call.down_bias_ED is not None
    if biased or gate_up.format is not down.format or gate_up.format not in (PLAIN, BF16):
        return False
    ids = call.expert_TK.dtype == torch.int32 and call.expert_TK.is_contiguous()
    if not ids or not is_plain(call.x_TD, call.weight_TK):
        return False
    if gate_up.format is BF16:
        return gate_up.data.is_contiguous() and down.data.is_contiguous()
    return is_plain(gate_up.data, down.data)


@ops.experts.kernel("c", on=("cpu",), accepts=accepts, traits=("bf16",))
def experts(call: ExpertsCall) -> torch.Tensor:
    if call.x_TD.shape[0] <= TOKENS:
        return _few(call)
    parts = zip(call.x_TD.split(TOKENS), call.expert_TK.split(TOKENS), call.weight_TK.split(TOKENS), strict=True)
    calls = (call._replace(x_TD=x_TD, expert_TK=expert_TK, weight_TK=weight_TK) for x_TD, expert_TK, weight_TK in parts)
    return torch.cat([_few(part) for part in calls])


def _few(call: ExpertsCall) -> torch.Tensor:
    x_TD, expert_TK, gate_up_EFD, down_EDI = call.x_TD, call.expert_TK, call.gate_up_EFD.data, call.down_EDI.data
    num_experts, width, inner = down_EDI.shape
    y_TD = torch.empty_like(x_TD)
    compute(
        y_TD.data_ptr(),
        x_TD.data_ptr(),
        call.weight_TK.data_ptr(),
        expert_TK.data_ptr(),
        gate_up_EFD.data_ptr(),
        down_EDI.data_ptr(),
        *expert_TK.shape,
        num_experts,
        width,
        inner,
        call.scaling,
        down_EDI.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )
    return y_TD
