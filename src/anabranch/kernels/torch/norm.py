"""RMSNorm in few calls; torch's own makes more of them. fp32 only, but for what is composed. T tokens, D width."""

import torch

from anabranch import ops


def accepts(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> bool:
    return x.dtype == torch.float32


@ops.rms_norm.kernel("torch", on=("cpu", "fake"), accepts=accepts)
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    y = x * norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return y if weight_D is None else y.mul_(weight_D)


def accepts_add(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> bool:
    return x_TD.dtype == torch.float32


@ops.add_rms_norm.kernel("torch", on=("cpu", "fake"), accepts=accepts_add)
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    total_TD = x_TD + residual_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


@ops.norm_add.kernel("torch")
def norm_add(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: torch.Tensor,
    scale_1: torch.Tensor | None = None,
) -> torch.Tensor:
    total_TD = residual_TD + ops.rms_norm(x_TD, weight_D, eps)
    return total_TD if scale_1 is None else total_TD * scale_1
