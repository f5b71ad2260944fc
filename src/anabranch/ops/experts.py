"""The experts' feed-forward: every token's chosen experts, weighted and summed into the token's row.

One op for the whole way (sort, gate/up, activation, down, combine), because how much of it a kernel fuses depends on
the number of tokens: few tokens need no sort at all. The steps are ops of their own too.

T tokens, D hidden width, K experts per token, E experts, I expert width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.activation import gated_activation
from anabranch.ops.op import Sample, op

COMBINES = ("fastest", "fused", "ordered", "unfused")


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for label, tokens, num_experts, top_k, width, inner, options in (
        ("one token", 1, 8, 2, 32, 16, {}),
        ("E=6, top 4, gelu", 13, 6, 4, 24, 20, {"activation": "gelu_tanh"}),
        ("scaled, biased", 5, 4, 2, 16, 16, {"scaling": 2.5, "bias": True}),
        ("uncombined", 6, 4, 3, 16, 8, {"combined": False, "scaling": 0.5}),
        ("all tokens to one expert", 9, 5, 1, 16, 16, {"same": True}),
        ("fused", 12, 6, 3, 16, 16, {"combine": "fused"}),
        ("ordered", 12, 6, 3, 16, 16, {"combine": "ordered", "scaling": 0.5}),
        ("unfused", 3, 6, 3, 16, 16, {"combine": "unfused"}),
        ("no tokens", 0, 4, 2, 16, 8, {}),
    ):
        expert = torch.rand(tokens, num_experts, generator=generator).argsort(-1)[:, :top_k].int()
        if "same" in options:
            expert.fill_(3)
        elif tokens > 1 and options.get("combined", True):
            expert[1] = -1  # padding
            expert[-1, 0] = -1  # an expert that lives elsewhere
        biased = "bias" in options
        yield (
            label,
            {
                "x_TD": draw(tokens, width).to(dtype),
                "weight_TK": torch.rand(tokens, top_k, generator=generator),
                "expert_TK": expert,
                "gate_up_EFD": (draw(num_experts, 2 * inner, width) * width**-0.5).to(dtype),
                "down_EDI": (draw(num_experts, width, inner) * inner**-0.5).to(dtype),
                "activation": options.get("activation", "silu"),
                "gate_up_bias_EF": draw(num_experts, 2 * inner).to(dtype) if biased else None,
                "down_bias_ED": draw(num_experts, width).to(dtype) if biased else None,
                "scaling": options.get("scaling", 1.0),
                "combined": options.get("combined", True),
                "combine": options.get("combine", "fastest"),
            },
        )


def fake(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    gate_up_EFD: torch.Tensor,
    down_EDI: torch.Tensor,
    activation: str,
    gate_up_bias_EF: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    scaling: float = 1.0,
    combined: bool = True,
    combine: str = "fastest",
) -> torch.Tensor:
    tokens, width = x_TD.shape
    return x_TD.new_empty(tokens, width) if combined else x_TD.new_empty(tokens, expert_TK.shape[1], width)


@op(samples=samples, fake=fake)
def experts(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    gate_up_EFD: torch.Tensor,
    down_EDI: torch.Tensor,
    activation: str,
    gate_up_bias_EF: torch.Tensor | None = None,
    down_bias_ED: torch.Tensor | None = None,
    scaling: float = 1.0,
    combined: bool = True,
    combine: str = "fastest",
) -> torch.Tensor:
    """y_TD[t] = scaling · Σ_k weight[t, k] · FFN of expert expert_TK[t, k] on x[t]; id −1 adds nothing.

    F = 2 · I: gate rows first, then up rows. With `combined=False`: y_TKD, the weighted rows before the sum;
    those of id −1 are not defined.
    `combine` says how a kernel brings rows back to their token, always in fp32: `fused` adds into the token's row where
    they are computed, in any order; `ordered` gives the same bits every time for the same batch; `unfused` writes all
    rows and sums them; `fastest` is one of them, by the number of tokens. Here all of them are the same.
    Never writes over x: a shared expert on a side stream may still be reading it.
    """
    if combine not in COMBINES:
        raise ValueError(f"combine {combine!r} is none of {', '.join(COMBINES)}")
    tokens, top_k = expert_TK.shape
    y_TKD = torch.zeros(tokens, top_k, x_TD.shape[1], device=x_TD.device)
    for t, experts_of_token in enumerate(expert_TK.tolist()):
        for k, e in enumerate(experts_of_token):
            if e < 0:
                continue
            h = gate_up_EFD[e].float() @ x_TD[t].float()
            if gate_up_bias_EF is not None:
                h = h + gate_up_bias_EF[e].float()
            y = down_EDI[e].float() @ gated_activation.reference(h[None], activation)[0]
            if down_bias_ED is not None:
                y = y + down_bias_ED[e].float()
            y_TKD[t, k] = y * weight_TK[t, k] * scaling
    return (y_TKD.sum(1) if combined else y_TKD).to(x_TD.dtype)
