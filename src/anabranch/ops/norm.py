"""Root-mean-square normalisation over the last dimension, computed in fp32. T tokens, D width."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.op import Sample, op


def rms_norm_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for shape, weighted in (((3, 64), True), ((2, 4, 24), True), ((5, 7), False), ((0, 16), True)):
        yield (
            f"{'x'.join(map(str, shape))} weight={weighted}",
            {
                "x": torch.randn(shape, generator=generator).to(dtype),
                "weight_D": torch.rand(shape[-1], generator=generator).to(dtype) if weighted else None,
                "eps": 1e-6,
            },
        )


@op(samples=rms_norm_samples)
def rms_norm(x: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) · weight; without a weight only x / rms(x)."""
    x32 = x.float()
    y = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    if weight_D is not None:
        y = y * weight_D.float()
    return y.to(x.dtype)


def add_rms_norm_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for tokens, width in ((1, 64), (6, 40), (0, 16)):
        yield (
            f"T{tokens} D{width}",
            {
                "x_TD": torch.randn(tokens, width, generator=generator).to(dtype),
                "residual_TD": torch.randn(tokens, width, generator=generator).to(dtype),
                "weight_D": torch.rand(width, generator=generator).to(dtype),
                "eps": 1e-5,
            },
        )


@op(samples=add_rms_norm_samples)
def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual). Writes over neither input."""
    total_TD = x_TD + residual_TD
    return rms_norm.reference(total_TD, weight_D, eps), total_TD


def norm_add_samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for tokens, width, scaled in ((1, 64, False), (6, 40, True), (0, 16, True)):
        yield (
            f"T{tokens} D{width} scale={scaled}",
            {
                "x_TD": torch.randn(tokens, width, generator=generator).to(dtype),
                "weight_D": torch.rand(width, generator=generator).to(dtype),
                "eps": 1e-5,
                "residual_TD": torch.randn(tokens, width, generator=generator).to(dtype),
                "scale_1": torch.rand(1, generator=generator).to(dtype) if scaled else None,
            },
        )


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
