"""Gated activations. T rows, I intermediate width."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from anabranch.ops.op import Sample, op

ACTIVATIONS = ("silu", "gelu_tanh")


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    for kind in ACTIVATIONS:
        for rows, width in ((4, 48), (1, 7), (0, 8)):
            x = 3 * torch.randn(rows, 2 * width, generator=generator)
            yield f"{kind} T{rows} I{width}", {"x_T2I": x.to(dtype), "kind": kind}


@op(samples=samples)
def gated_activation(x_T2I: torch.Tensor, kind: str) -> torch.Tensor:
    """activation(gate) · up, where the first half of each row is the gate and the second half is up."""
    gate, up = x_T2I.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    raise ValueError(f"unknown activation {kind!r} (known: {', '.join(ACTIVATIONS)})")
