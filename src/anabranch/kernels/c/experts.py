"""Experts of few tokens: each weight that is hit is read once, where it is.

T tokens, D hidden width, K experts per token, E experts, I expert width.
"""

import torch

from anabranch import ops
from anabranch.formats import PLAIN
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain
from anabranch.ops.experts import ExpertsCall

compute = function("experts")


def accepts(call: ExpertsCall) -> bool:
    return 0 < call.x_TD.shape[0] <= MAX_ROWS and fits(call)


def fits(call: ExpertsCall) -> bool:
    """But for the number of tokens, which must be a few hundred at most: the kernel has tables of them on its stack."""
    gate_up, down = call.gate_up_EFD, call.down_EDI
    if not (call.combined and call.activation == "silu"):
        return False
    biased = call.gate_up_bias_EF is not None or call.down_bias_ED is not None
    plain = not biased and gate_up.format is PLAIN and down.format is PLAIN
    ids = call.expert_TK.dtype == torch.int32 and call.expert_TK.is_contiguous()
    return plain and ids and is_plain(call.x_TD, call.weight_TK, gate_up.data, down.data)


@ops.experts.kernel("c", on=("cpu",), accepts=accepts)
def experts(call: ExpertsCall) -> torch.Tensor:
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
        torch.get_num_threads(),
    )
    return y_TD
