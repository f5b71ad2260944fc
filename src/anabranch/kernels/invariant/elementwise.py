"""Functions of single elements, computed in whole vectors.

torch's loops compute what is left after whole vectors, at the end of each thread's part, by other code, which may round
otherwise. So rows are padded to whole vectors, and calls are too small to be divided among threads. For some functions
(gelu) torch has other code for contiguous tensors, such as one row of a slice is and several rows are not: so all are
made contiguous. Sums, products, quotients and roots need no such care: all code rounds them alike, unless it fuses two
(`addcmul`).

T rows, I intermediate width, D width, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from anabranch import ops
from anabranch.kernels.invariant import in_c
from anabranch.ops.activation import SWIGLU_LIMIT, SWIGLU_SLOPE

LINE = 128
"""Bytes of two of the longest vectors, as many as a loop takes at once."""
UNDIVIDED = 1 << 14
"""Elements of a call; torch divides more than twice as many among threads."""


def in_vectors(function: Callable[[torch.Tensor], torch.Tensor], x_TD: torch.Tensor) -> torch.Tensor:
    """function(x)."""
    width = x_TD.shape[-1]
    if missing := -width % (LINE // x_TD.element_size()):
        x_TD = F.pad(x_TD, (0, missing))
    x_TD = x_TD.contiguous()
    rows = max(1, UNDIVIDED // x_TD[:1].numel()) if x_TD.numel() else 1
    y_TD = function(x_TD) if x_TD.shape[0] <= rows else torch.cat([function(part) for part in x_TD.split(rows)])
    return y_TD[..., :width] if missing else y_TD


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@ops.gated_activation.kernel("invariant", on=("cpu", "fake"))
def gated_activation(x_T2I: torch.Tensor, kind: str) -> torch.Tensor:
    if (found := in_c.gated(x_T2I, kind)) is not None:
        return found
    gate, up = x_T2I.chunk(2, dim=-1)
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * in_vectors(torch.sigmoid, SWIGLU_SLOPE * gate) * (up + 1)
    if kind not in ("silu", "gelu_tanh"):
        return ops.gated_activation.reference(x_T2I, kind)  # raises
    return in_vectors(F.silu if kind == "silu" else _gelu, gate) * up


@ops.add_gated.kernel("invariant", on=("cpu", "fake"))
def add_gated(x_TD: torch.Tensor, gated_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    found = in_c.add_gated(x_TD, gated_TD, gate_T1)
    return x_TD + in_vectors(torch.sigmoid, gate_T1) * gated_TD if found is None else found


@ops.multiply_gated.kernel("invariant", on=("cpu", "fake"))
def multiply_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * in_vectors(torch.sigmoid, gate)


@ops.cap_logits.kernel("invariant", on=("cpu", "fake"))
def cap_logits(logits_TV: torch.Tensor, cap: float) -> torch.Tensor:
    return in_vectors(torch.tanh, logits_TV.float() / cap) * cap
