"""The experts' feed-forward: every token's chosen experts, weighted and summed into the token's row.

One op for all of it (sort, gate/up, activation, down, combine), because how much of it a kernel fuses depends on the
number of tokens: few tokens need no sort at all.

T tokens, D hidden width, K experts per token, E experts, I expert width.
"""

from functools import partial
from typing import Any, NamedTuple

import torch

from anabranch.ops.activation import gated_activation
from anabranch.ops.op import Samples, op
from anabranch.ops.weight import Weight

COMBINES = ("fastest", "fused", "ordered", "unfused")


class ExpertsCall(NamedTuple):
    x_TD: torch.Tensor
    """Never written over: a shared expert on a side stream may still be reading it."""
    weight_TK: torch.Tensor
    """fp32."""
    expert_TK: torch.Tensor
    """int32; −1 adds nothing: padding, or an expert that another rank holds."""
    gate_up_EFD: Weight
    """F = 2 · I: gate rows first, then up rows."""
    down_EDI: Weight
    activation: str
    gate_up_bias_EF: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    scaling: float = 1.0
    combined: bool = True
    """False: the result is y_TKD, the weighted rows before the sum; those of id −1 are not defined."""
    combine: str = "fastest"
    """How a kernel brings rows back to their token, always in fp32: `fused` adds into the token's row where they are
    computed, in any order; `ordered` gives the same bits every time for the same batch; `unfused` writes all rows and
    sums them; `fastest` is the fastest of these for the number of tokens."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    draw = partial(torch.randn, generator=generator)
    cases: list[tuple[str, int, int, int, int, int, dict[str, Any]]] = [
        ("one token", 1, 8, 2, 32, 16, {}),
        ("E=6, top 4, gelu", 13, 6, 4, 24, 20, {"activation": "gelu_tanh"}),
        ("scaled, biased", 5, 4, 2, 16, 16, {"scaling": 2.5}),
        ("clamped_swiglu, biased", 5, 4, 2, 16, 16, {"activation": "clamped_swiglu"}),
        ("uncombined", 6, 4, 3, 16, 8, {"combined": False, "scaling": 0.5}),
        ("all tokens to one expert", 9, 5, 1, 16, 16, {}),
        ("fused", 12, 6, 3, 16, 16, {"combine": "fused"}),
        ("ordered", 12, 6, 3, 16, 16, {"combine": "ordered", "scaling": 0.5}),
        ("unfused", 3, 6, 3, 16, 16, {"combine": "unfused"}),
        ("no tokens", 0, 4, 2, 16, 8, {}),
    ]
    for label, tokens, num_experts, top_k, width, inner, options in cases:
        expert = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].int()
        if label == "all tokens to one expert":
            expert.fill_(3)
        elif tokens > 1 and label != "uncombined":
            expert[1] = -1  # padding
            expert[-1, 0] = -1  # an expert that another rank holds
        call = ExpertsCall(
            x_TD=draw(tokens, width).to(dtype),
            weight_TK=torch.rand(tokens, top_k, generator=generator),
            expert_TK=expert,
            gate_up_EFD=Weight.of((draw(num_experts, 2 * inner, width) * width**-0.5).to(dtype)),
            down_EDI=Weight.of((draw(num_experts, width, inner) * inner**-0.5).to(dtype)),
            activation=options.pop("activation", "silu"),
            gate_up_bias_EF=draw(num_experts, 2 * inner).to(dtype) if label.endswith("biased") else None,
            down_bias_ED=draw(num_experts, width).to(dtype) if label.endswith("biased") else None,
            **options,
        )
        yield label, {"call": call}


def new_result(call: ExpertsCall) -> torch.Tensor:
    """Memory for y_TD, or y_TKD."""
    (tokens, top_k), width = call.expert_TK.shape, call.x_TD.shape[1]
    return call.x_TD.new_empty((tokens, width) if call.combined else (tokens, top_k, width))


@op(samples=samples, fake=new_result)
def experts(call: ExpertsCall) -> torch.Tensor:
    """y_TD[t] = scaling · Σ_k weight[t, k] · FFN of expert expert_TK[t, k] on x[t]. All ways to combine are the same
    here."""
    if call.combine not in COMBINES:
        raise ValueError(f"combine {call.combine!r} is none of {', '.join(COMBINES)}")
    x_TD = call.x_TD
    gate_up_EFD, down_EDI = call.gate_up_EFD.dense(x_TD.dtype), call.down_EDI.dense(x_TD.dtype)
    y_TKD = torch.zeros(*call.expert_TK.shape, x_TD.shape[1], device=x_TD.device)
    for t, experts_of_token in enumerate(call.expert_TK.tolist()):
        for k, e in enumerate(experts_of_token):
            if e < 0:
                continue
            h = gate_up_EFD[e].float() @ x_TD[t].float()
            if call.gate_up_bias_EF is not None:
                h = h + call.gate_up_bias_EF[e].float()
            y = down_EDI[e].float() @ gated_activation.reference(h[None], call.activation)[0]
            if call.down_bias_ED is not None:
                y = y + call.down_bias_ED[e].float()
            y_TKD[t, k] = y * call.weight_TK[t, k] * call.scaling
    return (y_TKD.sum(1) if call.combined else y_TKD).to(x_TD.dtype)
