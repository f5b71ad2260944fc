"""Dense projection. T tokens, D inputs, F outputs."""

import torch
import torch.nn.functional as F

from anabranch.formats import PLAIN
from anabranch.ops.op import Samples, op
from anabranch.ops.weight import Weight


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for tokens, width, out, bias, out_dtype in (
        (1, 64, 96, False, None),
        (5, 48, 33, True, None),
        (3, 64, 8, False, torch.float32),
        (0, 16, 8, False, None),
    ):
        yield (
            f"T{tokens} D{width} F{out} bias={bias} out={out_dtype}",
            {
                "x_TD": torch.randn(tokens, width, generator=generator).to(dtype),
                "weight_FD": Weight.of(torch.randn(out, width, generator=generator).to(dtype)),
                "bias_F": torch.randn(out, generator=generator).to(dtype) if bias else None,
                "out_dtype": out_dtype,
            },
        )


def fake(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return x_TD.new_empty(*x_TD.shape[:-1], weight_FD.shape[0], dtype=out_dtype or x_TD.dtype)


@op(samples=samples, fake=fake)
def linear(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x · weightᵀ + bias, in x's dtype; with `out_dtype` the sum is not rounded to x's dtype on its way there."""
    dtype = out_dtype or x_TD.dtype
    if dtype == x_TD.dtype and weight_FD.format is PLAIN:  # as it is: this is what most products on a CPU are
        return F.linear(x_TD, weight_FD.data, bias_F)
    return F.linear(x_TD.to(dtype), weight_FD.dense(dtype), None if bias_F is None else bias_F.to(dtype))


def heads_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for tokens, heads, width, out in ((1, 2, 16, 24), (5, 3, 24, 8), (0, 2, 8, 8)):
        x_THD, weight_HDF = (
            torch.randn(*shape, generator=generator) for shape in ((tokens, heads, width), (heads, width, out))
        )
        yield f"T{tokens} H{heads} D{width} F{out}", {"x_THD": x_THD.to(dtype), "weight_HDF": weight_HDF.to(dtype)}


@op(samples=heads_samples)
def linear_heads(x_THD: torch.Tensor, weight_HDF: torch.Tensor) -> torch.Tensor:
    """y_THF = x · weight, of each head by its own matrix; rows of a token lie together."""
    y_THF = x_THD.new_empty(*x_THD.shape[:2], weight_HDF.shape[2])
    torch.bmm(x_THD.transpose(0, 1), weight_HDF, out=y_THF.transpose(0, 1))
    return y_THF
