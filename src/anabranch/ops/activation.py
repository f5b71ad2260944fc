"""Gates: of a feed-forward's values, and of a whole feed-forward. Bounds of logits.

T rows, I intermediate width, D width, V vocabulary.
"""

import torch
import torch.nn.functional as F

from anabranch.ops.op import Samples, op

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702
"""Of clamped_swiglu, as gpt-oss was trained with."""


def gated_activation_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for kind in ACTIVATIONS:
        for rows, width in ((4, 48), (1, 7), (0, 8)):
            x = (6 if kind == "clamped_swiglu" else 3) * torch.randn(rows, 2 * width, generator=generator)
            yield f"{kind} T{rows} I{width}", {"x_T2I": x.to(dtype), "kind": kind}


@op(samples=gated_activation_samples)
def gated_activation(x_T2I: torch.Tensor, kind: str) -> torch.Tensor:
    """activation(gate) · up, where the first half of each row is the gate and the second half is up. clamped_swiglu
    bounds both first, and multiplies by up + 1."""
    gate, up = x_T2I.chunk(2, dim=-1)
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(SWIGLU_SLOPE * gate) * (up + 1)
    raise ValueError(f"unknown activation {kind!r} (known: {', '.join(ACTIVATIONS)})")


def add_gated_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for tokens, width in ((1, 64), (5, 40), (3, 1100), (2, 7), (0, 16)):
        x_TD, gated_TD = (torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(2))
        gate_T1 = (3 * torch.randn(tokens, 1, generator=generator)).to(dtype)
        yield f"T{tokens} D{width}", {"x_TD": x_TD, "gated_TD": gated_TD, "gate_T1": gate_T1}


def multiply_gated_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for shape in ((1, 4, 16), (5, 3, 7), (0, 2, 8)):
        x, gate = (3 * torch.randn(2, *shape, generator=generator)).to(dtype)
        yield "x".join(map(str, shape)), {"x": x, "gate": gate}


@op(samples=multiply_gated_samples)
def multiply_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x · sigmoid(gate), each rounded to x's dtype."""
    return x * torch.sigmoid(gate)


@op(samples=add_gated_samples)
def add_gated(x_TD: torch.Tensor, gated_TD: torch.Tensor, gate_T1: torch.Tensor) -> torch.Tensor:
    """x + sigmoid(gate) · gated, each of the three rounded to x's dtype. Writes over no input."""
    return x_TD + torch.sigmoid(gate_T1) * gated_TD


def cap_logits_samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    for rows, vocabulary in ((1, 64), (5, 97), (0, 8)):
        logits = (40 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
        yield f"T{rows} V{vocabulary}", {"logits_TV": logits, "cap": 30.0}


@op(samples=cap_logits_samples)
def cap_logits(logits_TV: torch.Tensor, cap: float) -> torch.Tensor:
    """cap · tanh(logits / cap), in fp32."""
    return torch.tanh(logits_TV.float() / cap) * cap
