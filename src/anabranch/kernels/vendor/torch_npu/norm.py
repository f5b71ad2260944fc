"""RMSNorm. T tokens, D width."""

import torch
import torch_npu

from anabranch import ops


def accepts(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> bool:
    return weight_D is not None and weight_D.dtype == x.dtype and x.numel() > 0


@ops.rms_norm.kernel("torch_npu", on=("npu",), accepts=accepts)
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    return torch_npu.npu_rms_norm(x, weight_D, eps)[0]


def accepts_add(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> bool:
    return weight_D.dtype == x_TD.dtype == residual_TD.dtype and x_TD.numel() > 0


@ops.add_rms_norm.kernel("torch_npu", on=("npu",), accepts=accepts_add)
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    y_TD, _, total_TD = torch_npu.npu_add_rms_norm(x_TD, residual_TD, weight_D, eps)
    return y_TD, total_TD
