"""Gated activations. T rows, I intermediate width."""

import torch
import torch_npu

from anabranch import ops

TANH = 1
"""Of geglu's `approximate`."""


def accepts(x_T2I: torch.Tensor, kind: str) -> bool:
    return kind in ("silu", "gelu_tanh") and x_T2I.numel() > 0


@ops.gated_activation.kernel("torch_npu", on=("npu",), accepts=accepts)
def gated_activation(x_T2I: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "silu":
        return torch_npu.npu_swiglu(x_T2I, dim=-1)
    return torch_npu.npu_geglu(x_T2I, dim=-1, approximate=TANH, activate_left=True)[0]
