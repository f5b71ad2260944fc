"""Gates. T rows, I intermediate width, D width."""

import torch

from anabranch import ops
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain

silu, add = function("gated_silu"), function("add_gated")


def accepts_gated(x_T2I: torch.Tensor, kind: str) -> bool:
    return x_T2I.shape[0] <= MAX_ROWS and fits_gated(x_T2I, kind)


def fits_gated(x_T2I: torch.Tensor, kind: str) -> bool:
    return kind == "silu" and x_T2I.dim() == 2 and is_plain(x_T2I)


@ops.gated_activation.kernel("c", on=("cpu",), accepts=accepts_gated)
def gated_activation(x_T2I: torch.Tensor, kind: str) -> torch.Tensor:
    rows, width = x_T2I.shape
    y_TI = x_T2I.new_empty(rows, width // 2)
    silu(y_TI.data_ptr(), x_T2I.data_ptr(), rows, width // 2)
    return y_TI


def accepts_add(x_TD: torch.Tensor, gated_TD: torch.Tensor, gate_T1: torch.Tensor) -> bool:
    return x_TD.shape[0] <= MAX_ROWS and is_plain(x_TD, gated_TD, gate_T1)


@ops.add_gated.kernel("c", on=("cpu",), accepts=accepts_add)
def add_gated(x_TD: torch.Tensor, gated_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    y_TD = torch.empty_like(x_TD)
    add(y_TD.data_ptr(), x_TD.data_ptr(), gated_TD.data_ptr(), gate_T1.data_ptr(), *x_TD.shape)
    return y_TD
