"""Products in blocks of rows. X heads or nothing, T rows, D inputs, F outputs."""

import torch
import torch.nn.functional as F

from anabranch import ops
from anabranch.kernels.invariant import in_c
from anabranch.kernels.invariant.blocks import PIVOT, SIZES, agreeing, cover
from anabranch.ops.weight import Weight
from anabranch.platforms.cpu import threads

PROBED = 1 << 34
"""Multiplications of the largest product that is tried."""
_known: dict[tuple[torch.Size, tuple[int, ...], torch.dtype], tuple[int, ...]] = {}
"""By shape, strides and dtype of a weight."""


def product(x_XTD: torch.Tensor, weight_XDF: torch.Tensor) -> torch.Tensor:
    """x · weight: a matrix, or one of each head."""
    like = weight_XDF.shape, weight_XDF.stride(), weight_XDF.dtype
    sizes = _known.get(like)
    if sizes is None:
        sizes = _known[like] = _agreeing(weight_XDF)
    blocks = cover(x_XTD.shape[-2], sizes or (PIVOT,))
    if not sizes:  # the number of threads matters too
        with threads(1):
            return _in_blocks(x_XTD, weight_XDF, blocks)
    return _in_blocks(x_XTD, weight_XDF, blocks)


def _in_blocks(x_XTD: torch.Tensor, weight_XDF: torch.Tensor, blocks: tuple[tuple[int, int, int], ...]) -> torch.Tensor:
    parts = []
    for begin, rows, size in blocks:
        block = x_XTD if len(blocks) == 1 else x_XTD.narrow(-2, begin, rows)
        if rows < size:
            parts.append(torch.matmul(F.pad(block, (0, 0, 0, size - rows)), weight_XDF).narrow(-2, 0, rows))
        else:
            parts.append(torch.matmul(block, weight_XDF))
    if not parts:
        return torch.matmul(x_XTD, weight_XDF)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def _agreeing(like: torch.Tensor) -> tuple[int, ...]:
    """Numbers of rows that agree for weights like this one. Sums cancel, so that short types hide no other order."""
    sizes = [size for size in SIZES if size <= PIVOT or size * like.numel() <= PROBED]
    generator, (*X, D, _) = torch.Generator().manual_seed(0), like.shape
    weight_XDF = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).normal_(generator=generator)
    x_XTD = torch.randn(*X, sizes[-1], D, generator=generator).to(like.dtype)
    one, other, rest = torch.randperm(D, generator=generator).tensor_split((D // 2, D // 2 * 2))
    x_XTD[..., other], x_XTD[..., rest], weight_XDF[..., other, :] = -x_XTD[..., one], 0, weight_XDF[..., one, :]

    def compute(x_XTD: torch.Tensor, size: int) -> torch.Tensor:
        return torch.cat([torch.matmul(block, weight_XDF) for block in x_XTD.split(size, -2)], -2)

    def same(size: int) -> bool:
        rows = max(size, PIVOT)
        found = compute(x_XTD.narrow(-2, 0, rows).roll(5, -2), size)  # a row's place must not matter either
        return torch.equal(found.roll(-5, -2), expected.narrow(-2, 0, rows))

    with threads(1):
        expected = compute(x_XTD, PIVOT)
    return agreeing(same, sizes, PIVOT)


@ops.linear.kernel("invariant", on=("cpu", "fake"), traits=in_c.TRAITS)
def linear(
    x_TD: torch.Tensor, weight_FD: Weight, bias_F: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    dtype = out_dtype or x_TD.dtype
    x_TD, bias_F = x_TD.to(dtype), None if bias_F is None else bias_F.to(dtype)
    if (found := in_c.product(x_TD, weight_FD, bias_F)) is not None:
        return found
    y_TF = product(x_TD, weight_FD.dense(dtype).mT)
    return y_TF if bias_F is None else y_TF + bias_F


@ops.linear_heads.kernel("invariant", on=("cpu", "fake"))
def linear_heads(x_THD: torch.Tensor, weight_HDF: torch.Tensor) -> torch.Tensor:
    return product(x_THD.transpose(0, 1), weight_HDF).transpose(0, 1)
