"""Router logits → which experts, with which weights. One op for every family.

T tokens, E experts, K chosen per token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from anabranch.ops.op import TOLERANCE, Sample, op

SCORES = ("softmax", "sigmoid")


def samples(dtype: torch.dtype, generator: torch.Generator) -> Iterator[Sample]:
    def logits(tokens: int, num_experts: int) -> torch.Tensor:
        return (2 * torch.randn(tokens, num_experts, generator=generator)).to(dtype)

    yield "softmax, renormalised", {"logits_TE": logits(9, 8), "top_k": 2}
    yield "softmax, not renormalised, E=60", {"logits_TE": logits(5, 60), "top_k": 4, "renormalize": False}
    yield "one expert of two", {"logits_TE": logits(3, 2), "top_k": 1, "renormalize": False}
    yield "all experts", {"logits_TE": logits(3, 5), "top_k": 5, "scaling": 0.5}
    yield "k=16 of 512", {"logits_TE": logits(2, 512), "top_k": 16}
    yield "E=384", {"logits_TE": logits(2, 384), "top_k": 8}
    yield (
        "per-expert scale",
        {"logits_TE": logits(6, 16), "top_k": 3, "expert_scale_E": torch.rand(16, generator=generator)},
    )
    yield (
        "sigmoid with selection bias, grouped, scaled",
        {
            "logits_TE": logits(7, 16),
            "top_k": 4,
            "score": "sigmoid",
            "select_bias_E": torch.randn(16, generator=generator),
            "num_groups": 4,
            "top_groups": 2,
            "scaling": 2.5,
        },
    )
    yield "softmax, grouped", {"logits_TE": logits(4, 12), "top_k": 3, "num_groups": 3, "top_groups": 2}
    ties = torch.zeros(4, 10)
    ties[1, 3:7] = 1
    ties[2] = torch.tensor([0.0, -0.0] * 5)
    yield "ties, signed zeros", {"logits_TE": ties.to(dtype), "top_k": 3}
    infinite = torch.full((2, 6), float("-inf"))
    infinite[1, 4] = 1
    yield "minus infinity", {"logits_TE": infinite.to(dtype), "top_k": 2}
    padded = logits(6, 8)
    padded[4:] = float("nan")
    yield "padded rows hold NaN", {"logits_TE": padded, "top_k": 2, "num_tokens": torch.tensor(4, dtype=torch.int32)}
    yield "no tokens", {"logits_TE": logits(0, 8), "top_k": 2}


def fake(
    logits_TE: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    select_bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling: float = 1.0,
    expert_scale_E: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits_TE.shape[0], top_k
    return logits_TE.new_empty(shape, dtype=torch.float32), logits_TE.new_empty(shape, dtype=torch.int32)


@op(samples=samples, tolerance=dict.fromkeys(TOLERANCE, 1e-5), fake=fake)
def route(
    logits_TE: torch.Tensor,
    top_k: int,
    score: str = "softmax",
    renormalize: bool = True,
    select_bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scaling: float = 1.0,
    expert_scale_E: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight_TK fp32, expert_TK int32), best expert first; a tie goes to the lowest expert id.

    * `softmax`: probabilities over all experts; renormalised over the winners this equals a softmax over the winners
      alone, so families that take the softmax after top-k renormalise.
    * `sigmoid`: independent probabilities; `select_bias_E` is added for the selection only, never to the weight.
    * Groups: only the `top_groups` best of `num_groups` equal groups of experts may be chosen. A group counts as much
      as its best expert, or, with a selection bias, as its best two together.
    * The weight is then × `scaling` × `expert_scale_E[expert]`. A zero denominator gives weight 0, never NaN.
    * Rows from `num_tokens` (a device scalar) on are padding: expert −1, weight 0, whatever the logits hold.
    """
    logits = logits_TE.float()
    if score == "softmax":
        choice = logits  # monotone in the probability, and exact
        peak = logits.amax(-1, keepdim=True) if logits.shape[0] else logits[:, :1]
        unnormalized = torch.exp(logits - torch.where(peak == float("-inf"), 0.0, peak))
        probability = _divide(unnormalized, unnormalized.sum(-1, keepdim=True))
    elif score == "sigmoid":
        choice = probability = logits.sigmoid()
        unnormalized = probability
    else:
        raise ValueError(f"unknown router score {score!r} (known: {', '.join(SCORES)})")
    if select_bias_E is not None:
        choice = choice + select_bias_E.float()
    if num_groups > 1:
        choice = _keep_best_groups(choice, num_groups, top_groups, by_best_two=select_bias_E is not None)

    # torch.topk leaves the order of ties open; a stable sort does not. Adding 0.0 makes −0.0 equal to 0.0 bit for bit.
    expert_TK = torch.sort(choice + 0.0, dim=-1, descending=True, stable=True).indices[:, :top_k]
    if renormalize:
        weight_TK = unnormalized.gather(-1, expert_TK)
        weight_TK = _divide(weight_TK, weight_TK.sum(-1, keepdim=True))
    else:
        weight_TK = probability.gather(-1, expert_TK)
    weight_TK = weight_TK * scaling
    if expert_scale_E is not None:
        weight_TK = weight_TK * expert_scale_E.float()[expert_TK]

    expert_TK = expert_TK.int()
    if num_tokens is not None:
        padding = (torch.arange(logits.shape[0], device=logits.device) >= num_tokens)[:, None]
        expert_TK = expert_TK.masked_fill(padding, -1)
        weight_TK = weight_TK.masked_fill(padding, 0.0)
    return weight_TK, expert_TK


def _divide(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return torch.where(by == 0, 0.0, x / by)


def _keep_best_groups(choice_TE: torch.Tensor, num_groups: int, top_groups: int, by_best_two: bool) -> torch.Tensor:
    tokens, num_experts = choice_TE.shape
    grouped = choice_TE.view(tokens, num_groups, num_experts // num_groups)
    best = grouped.sort(dim=-1, descending=True).values[..., : 2 if by_best_two else 1].sum(-1)
    kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, :top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
    return grouped.masked_fill(~allowed[..., None], float("-inf")).view(tokens, num_experts)
