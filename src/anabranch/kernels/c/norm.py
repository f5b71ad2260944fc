"""RMSNorm, with the residual addition before it. T tokens, D width."""

import torch

from anabranch import ops
from anabranch.kernels.c.library import MAX_ROWS, function, is_plain, pointer

compute = function("add_rms_norm")


def accepts(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> bool:
    return x.dim() == 2 and x.shape[0] <= MAX_ROWS and is_plain(x, weight_D)


@ops.rms_norm.kernel("c", on=("cpu",), accepts=accepts)
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    y = torch.empty_like(x)
    compute(y.data_ptr(), None, x.data_ptr(), None, pointer(weight_D), *x.shape, eps)
    return y


def accepts_add(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> bool:
    return x_TD.shape[0] <= MAX_ROWS and is_plain(x_TD, residual_TD, weight_D)


@ops.add_rms_norm.kernel("c", on=("cpu",), accepts=accepts_add)
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    y_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    inputs = x_TD.data_ptr(), residual_TD.data_ptr(), weight_D.data_ptr()
    compute(y_TD.data_ptr(), total_TD.data_ptr(), *inputs, *x_TD.shape, eps)
    return y_TD, total_TD
