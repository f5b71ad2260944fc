"""Router logits → which experts, with which weights. One op for every family.

T tokens, E experts, K chosen per token.
"""

from typing import NamedTuple

import torch

from anabranch.ops.op import TOLERANCE, Samples, op

SCORES = ("softmax", "sigmoid")


class RouteCall(NamedTuple):
    logits_TE: torch.Tensor
    top_k: int
    score: str = "softmax"
    """softmax: probabilities over all experts; renormalised over the winners this equals a softmax over the winners
    alone, so families that take the softmax after top-k renormalise. sigmoid: independent probabilities."""
    renormalize: bool = True
    select_bias_E: torch.Tensor | None = None
    """Added to the probabilities, for the selection only, never to the weight."""
    num_groups: int = 1
    """Equal groups of experts, of which only the best `top_groups` may be chosen. A group counts as much as its best
    expert, or, with a selection bias, as its best two together."""
    top_groups: int = 1
    scaling: float = 1.0
    expert_scale_E: torch.Tensor | None = None
    """The weight is multiplied by `scaling` and by its expert's scale."""
    num_tokens: torch.Tensor | None = None
    """A device scalar: rows from there on are padding and give expert −1 and weight 0, whatever the logits hold."""


def samples(dtype: torch.dtype, generator: torch.Generator) -> Samples:
    def logits(tokens: int, num_experts: int) -> torch.Tensor:
        return (2 * torch.randn(tokens, num_experts, generator=generator)).to(dtype)

    ties = torch.zeros(4, 10)
    ties[1, 3:7] = 1
    ties[2] = torch.tensor([0.0, -0.0] * 5)
    infinite = torch.full((2, 6), float("-inf"))
    infinite[1, 4] = 1
    padded = logits(6, 8)
    padded[4:] = float("nan")
    bias_E = torch.randn(16, generator=generator)
    grouped = RouteCall(logits(7, 16), 4, "sigmoid", select_bias_E=bias_E, num_groups=4, top_groups=2, scaling=2.5)
    for label, call in {
        "softmax, renormalised": RouteCall(logits(9, 8), 2),
        "softmax, not renormalised, E=60": RouteCall(logits(5, 60), 4, renormalize=False),
        "one expert of two": RouteCall(logits(3, 2), 1, renormalize=False),
        "all experts": RouteCall(logits(3, 5), 5, scaling=0.5),
        "k=16 of 512": RouteCall(logits(2, 512), 16),
        "E=384": RouteCall(logits(2, 384), 8),
        "per-expert scale": RouteCall(logits(6, 16), 3, expert_scale_E=torch.rand(16, generator=generator)),
        "sigmoid with selection bias, grouped, scaled": grouped,
        "softmax, grouped": RouteCall(logits(4, 12), 3, num_groups=3, top_groups=2),
        "softmax with selection bias": RouteCall(logits(7, 16), 3, select_bias_E=0.1 * bias_E),
        "softmax with selection bias, not renormalised": RouteCall(
            logits(7, 16), 3, renormalize=False, select_bias_E=0.1 * bias_E
        ),
        "softmax with selection bias, E=60": RouteCall(logits(5, 60), 6, select_bias_E=bias_E.repeat(4)[:60] / 20),
        "ties, signed zeros": RouteCall(ties.to(dtype), 3),
        "minus infinity": RouteCall(infinite.to(dtype), 2),
        "padded rows hold NaN": RouteCall(padded, 2, num_tokens=torch.tensor(4, dtype=torch.int32)),
        "no tokens": RouteCall(logits(0, 8), 2),
    }.items():
        yield label, {"call": call}


def fake(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    shape = call.logits_TE.shape[0], call.top_k
    return call.logits_TE.new_empty(shape, dtype=torch.float32), call.logits_TE.new_empty(shape, dtype=torch.int32)


@op(samples=samples, tolerance=dict.fromkeys(TOLERANCE, 1e-5), fake=fake)
def route(call: RouteCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight_TK fp32, expert_TK int32), best expert first; a tie goes to the lowest expert id. A zero denominator
    gives weight 0, never NaN."""
    logits, select_bias_E = call.logits_TE.float(), call.select_bias_E
    if call.score == "softmax":
        choice = logits  # monotone in the probability, and exact
        peak = logits.amax(-1, keepdim=True) if logits.shape[0] else logits[:, :1]
        unnormalized = torch.exp(logits - torch.where(peak == float("-inf"), 0.0, peak))
        probability = _divide(unnormalized, unnormalized.sum(-1, keepdim=True))
    elif call.score == "sigmoid":
        choice = probability = logits.sigmoid()
        unnormalized = probability
    else:
        raise ValueError(f"unknown router score {call.score!r} (known: {', '.join(SCORES)})")
    if select_bias_E is not None:
        choice = probability + select_bias_E.float()
    if call.num_groups > 1:
        choice = _keep_best_groups(choice, call.num_groups, call.top_groups, by_best_two=select_bias_E is not None)

    # torch.topk leaves the order of ties open; a stable sort does not. Adding 0.0 makes −0.0 equal to 0.0 bit for bit.
    expert_TK = torch.sort(choice + 0.0, dim=-1, descending=True, stable=True).indices[:, : call.top_k]
    if call.renormalize:
        weight_TK = unnormalized.gather(-1, expert_TK)
        weight_TK = _divide(weight_TK, weight_TK.sum(-1, keepdim=True))
    else:
        weight_TK = probability.gather(-1, expert_TK)
    weight_TK = weight_TK * call.scaling
    if call.expert_scale_E is not None:
        weight_TK = weight_TK * call.expert_scale_E.float()[expert_TK]

    expert_TK = expert_TK.int()
    if call.num_tokens is not None:
        padding = (torch.arange(logits.shape[0], device=logits.device) >= call.num_tokens)[:, None]
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
