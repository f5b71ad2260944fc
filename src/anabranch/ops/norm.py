"""Root-mean-square normalisation over the last dimension, computed in fp32, and what is added before or after it.

T tokens, D width, K experts per token.

`fp8`: what reads the result may multiply its rows in FP8, so a kernel may attach them to it, as `groups` with a scale
each (kernels/triton/quantize_rows) or in two `parts` (kernels/triton/split_rows). The result itself is the same.
"""

import torch

from anabranch.ops.op import Samples, op


def rms_norm_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for shape, weighted in (((3, 64), True), ((2, 4, 24), True), ((5, 7), False), ((0, 16), True)):
        x = torch.randn(shape, generator=generator).to(dtype)
        weight_D = torch.rand(shape[-1], generator=generator).to(dtype) if weighted else None
        yield f"{'x'.join(map(str, shape))} weight={weighted}", {"x": x, "weight_D": weight_D, "eps": 1e-6}


@op(samples=rms_norm_samples)
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) · weight; without a weight only x / rms(x)."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight_D is not None:
        y = y * weight_D.float()
    return y.to(x.dtype)


def add_rms_norm_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for tokens, width in ((1, 64), (6, 40), (0, 16)):
        x_TD, residual_TD = (torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(2))
        weight_D = torch.rand(width, generator=generator).to(dtype)
        yield f"T{tokens} D{width}", {"x_TD": x_TD, "residual_TD": residual_TD, "weight_D": weight_D, "eps": 1e-5}


@op(samples=add_rms_norm_samples)
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, fp8: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual). Writes over neither input."""
    total_TD = x_TD + residual_TD
    return rms_norm.reference(total_TD, weight_D, eps), total_TD


def sum_add_rms_norm_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for tokens, top_k, width in ((1, 2, 64), (6, 3, 40), (4, 8, 24), (3, 1, 16), (0, 2, 16)):
        rows_TKD = torch.randn(tokens, top_k, width, generator=generator).to(dtype)
        expert_TK = torch.randint(9, (tokens, top_k), generator=generator, dtype=torch.int32)
        if tokens > 1:
            expert_TK[1] = -1  # padding
            expert_TK[-1, 0] = -1  # an expert that another rank holds
            rows_TKD[expert_TK < 0] = float("nan")
        residual_TD = torch.randn(tokens, width, generator=generator).to(dtype)
        weight_D = torch.rand(width, generator=generator).to(dtype)
        rows = {"rows_TKD": rows_TKD, "expert_TK": expert_TK}
        yield f"T{tokens} K{top_k} D{width}", {**rows, "residual_TD": residual_TD, "weight_D": weight_D, "eps": 1e-5}


@op(samples=sum_add_rms_norm_samples)
def sum_add_rms_norm(
    rows_TKD: torch.Tensor,
    expert_TK: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    fp8: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """add_rms_norm of x[t] = Σ_k rows[t, k], summed in fp32 and rounded: the last step of `experts(combined=False)`.
    Rows of id −1 count for nothing, whatever they hold. Writes over no input."""
    x_TD = rows_TKD.float().masked_fill((expert_TK < 0)[..., None], 0.0).sum(1).to(rows_TKD.dtype)
    return add_rms_norm.reference(x_TD, residual_TD, weight_D, eps)


def norm_add_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for tokens, width, scaled in ((1, 64, False), (6, 40, True), (0, 16, True)):
        x_TD, residual_TD = (torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(2))
        weight_D = torch.rand(width, generator=generator).to(dtype)
        scale_1 = torch.rand(1, generator=generator).to(dtype) if scaled else None
        arguments = {"x_TD": x_TD, "weight_D": weight_D, "eps": 1e-5, "residual_TD": residual_TD, "scale_1": scale_1}
        yield f"T{tokens} D{width} scale={scaled}", arguments


@op(samples=norm_add_samples)
def norm_add(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    residual_TD: torch.Tensor,
    scale_1: torch.Tensor | None = None,
) -> torch.Tensor:
    """(residual + norm(x)) · scale, each of the three rounded to x's dtype. Writes over no input."""
    total_TD = residual_TD + rms_norm.reference(x_TD, weight_D, eps)
    return total_TD if scale_1 is None else total_TD * scale_1
