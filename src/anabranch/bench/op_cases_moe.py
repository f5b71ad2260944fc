"""The experts and what belongs to them, for `anabranch bench ops`: router, sort, the feed-forward itself.

T tokens, D hidden width, K experts per token, E experts, I expert width.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from anabranch import ops
from anabranch.bench.op_cases import Case, Setting, cases, num_sets
from anabranch.bench.op_shapes import ModelShape

ROUTE_TARGETS = {
    torch.bfloat16: {1: 2.0, 64: 2.2, 2048: 3.0, 16384: 5.0, 250_000: 50.0},
    torch.float32: {1: 2.5, 250_000: 90.0},
}
SORT_TARGETS = {256: 3.0, 16384: 10.0}
JUDGED_TOKENS = 512
"""The first tokens of a batch are compared with an exact result."""


def draw_logits(setting: Setting, model: ModelShape, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uniform routing; or by Zipf's law: the r-th most popular expert is drawn in proportion to 1 / r."""
    device, E = setting.platform.device, model.num_experts
    if not setting.zipf:
        return (2 * torch.randn(tokens, E, device=device)).to(dtype)
    rank = torch.randperm(E, device=device) + 1
    gumbel = -torch.log(-torch.log(torch.rand(tokens, E, device=device)))
    return (gumbel - torch.log(rank.float())).to(dtype)


@cases("route")
def route(setting: Setting) -> Iterator[Case]:
    """With a learned scale for each expert, as Gemma 4's router has; in every dtype that logits may have."""
    dtypes = (torch.float32,) if setting.small else (torch.bfloat16, torch.float16, torch.float32)
    for model in setting.models:
        scale_E = torch.rand(model.num_experts, device=setting.platform.device) + 0.5
        for dtype in dtypes:
            for tokens in setting.sizes(1, 2, 16, 64, 256, 1024, 2048, 4096, 16384, 250_000):
                logits = [draw_logits(setting, model, tokens, dtype) for _ in range(4)]
                rest: Any = {"top_k": model.top_k, "renormalize": model.renormalize, "expert_scale_E": scale_E}
                target = ROUTE_TARGETS.get(dtype, {}).get(tokens) if model.num_experts == 128 else None
                yield Case(
                    model.name,
                    tokens,
                    f"E {model.num_experts} k {model.top_k} {str(dtype).removeprefix('torch.')}",
                    [partial(ops.route, logits_TE, **rest) for logits_TE in logits],
                    num_bytes=tokens * (model.num_experts * dtype.itemsize + 8 * model.top_k),
                    expected=partial(ops.route.reference, logits[0], **rest),
                    more={"target_us": target},
                    also={"eager": [partial(ops.route.reference, logits_TE, **rest) for logits_TE in logits]},
                )


@cases("expert_sort")
def expert_sort(setting: Setting) -> Iterator[Case]:
    for model in setting.models:
        for tokens in setting.sizes(1, 16, 64, 256, 512, 1024, 4096, 16384):
            chosen = [draw_logits(setting, model, tokens).topk(model.top_k).indices.int() for _ in range(4)]
            yield Case(
                model.name,
                tokens,
                f"E {model.num_experts} k {model.top_k}",
                [partial(ops.expert_sort, expert_TK, model.num_experts) for expert_TK in chosen],
                num_bytes=4.0 * (2 * tokens * model.top_k + model.num_experts + 1),
                expected=partial(ops.expert_sort.reference, chosen[0], model.num_experts),
                more={"target_us": SORT_TARGETS.get(tokens) if model.top_k == 8 else None},
            )


@cases("experts")
def experts(setting: Setting) -> Iterator[Case]:
    """Plan, gate/up, activation, down and combine; routing is given. `error`: against fp64."""
    for model in setting.models:
        one = 3 * model.num_experts * model.width * model.inner * setting.dtype.itemsize
        weights = [draw_weights(setting, model) for _ in range(min(4, num_sets(one)) if setting.small else 4)]
        for tokens in setting.sizes(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
            torch.manual_seed(tokens)
            inputs = []
            for i in range(4 * len(weights) if tokens <= 64 else len(weights)):
                weight_TK, expert_TK = draw_logits(setting, model, tokens).softmax(-1).topk(model.top_k)
                weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
                x_TD = setting.normal(tokens, model.width)
                inputs.append((x_TD, weight_TK, expert_TK.int(), *weights[i % len(weights)], model.activation))
            hit = sum(given[2].unique().numel() for given in inputs) / len(inputs)
            elements = 3 * model.width * model.inner
            for combine in setting.combines:
                yield Case(
                    model.name,
                    tokens,
                    ("zipf, " if setting.zipf else "") + combine,
                    [partial(ops.experts, *given, combine=combine) for given in inputs],
                    num_bytes=(hit * elements + 2 * tokens * model.width) * setting.dtype.itemsize,
                    flops=2.0 * tokens * model.top_k * elements,
                    expected=partial(exact, *inputs[0]),
                    more={"target_us": model.experts_target.get(tokens), "vllm_us": model.experts_vllm.get(tokens)},
                )


def draw_weights(setting: Setting, model: ModelShape) -> tuple[torch.Tensor, torch.Tensor]:
    E, D, inner = model.num_experts, model.width, model.inner
    return setting.normal(E, 2 * inner, D) * D**-0.5, setting.normal(E, D, inner) * inner**-0.5


def exact(
    x_TD: torch.Tensor,
    weight_TK: torch.Tensor,
    expert_TK: torch.Tensor,
    gate_up_EFD: torch.Tensor,
    down_EDI: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """In fp64, expert by expert, for the first tokens."""
    x_TD, weight_TK, expert_TK = (x[:JUDGED_TOKENS] for x in (x_TD, weight_TK, expert_TK))
    y_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for e in range(down_EDI.shape[0]):
        token, slot = (expert_TK == e).nonzero(as_tuple=True)
        if token.numel():
            h = ops.gated_activation.reference(x_TD[token].double() @ gate_up_EFD[e].double().T, activation)
            y_TD.index_add_(0, token, h @ down_EDI[e].double().T * weight_TK[token, slot, None].double())
    return y_TD
