"""The router's meaning: against transformers' routers, and where they leave it open, as the op's docstring has it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from anabranch import ops

TOKENS, EXPERTS, TOP_K = 50, 16, 4


def route(*args: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.route.reference(ops.RouteCall(*args, **options))


def check(found: tuple[torch.Tensor, torch.Tensor], weight_TK: torch.Tensor, expert_TK: torch.Tensor) -> None:
    """The same experts with the same weights, in any order."""
    assert (found[0].dtype, found[1].dtype) == (torch.float32, torch.int32)
    (weight, expert), order = found, expert_TK.argsort(-1)
    mine = expert.argsort(-1)
    assert torch.equal(expert.gather(-1, mine).long(), expert_TK.gather(-1, order))
    torch.testing.assert_close(weight.gather(-1, mine), weight_TK.gather(-1, order), rtol=1e-5, atol=1e-7)


def with_logits(router: Any) -> Any:
    """A router whose logits are its input."""
    router.weight = nn.Parameter(torch.eye(EXPERTS))
    return router


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "olmoe", "mixtral"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_as_the_softmax_families_do_it(family: str, renormalize: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    if family == "mixtral" and not renormalize:
        pytest.skip("Mixtral always renormalises")
    routers = {
        "qwen2_moe": Qwen2MoeTopKRouter,
        "qwen3_moe": Qwen3MoeTopKRouter,
        "olmoe": OlmoeTopKRouter,
        "mixtral": MixtralTopKRouter,
    }
    config = SimpleNamespace(
        hidden_size=EXPERTS,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=renormalize,
    )
    logits_TE = 3 * torch.randn(TOKENS, EXPERTS)
    _, weight_TK, expert_TK = with_logits(routers[family](config))(logits_TE)
    check(route(logits_TE, TOP_K, renormalize=renormalize), weight_TK, expert_TK)


def test_as_gemma4_does_it() -> None:
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter

    config = SimpleNamespace(hidden_size=EXPERTS, rms_norm_eps=1e-6, num_experts=EXPERTS, top_k_experts=TOP_K)
    router = Gemma4TextRouter(config)
    router.norm, router.scalar_root_size = nn.Identity(), 1.0
    router.proj.weight.data = torch.eye(EXPERTS)
    router.per_expert_scale.data = torch.randn(EXPERTS)
    logits_TE = 3 * torch.randn(TOKENS, EXPERTS)
    _, weight_TK, expert_TK = router(logits_TE)
    check(route(logits_TE, TOP_K, expert_scale_E=router.per_expert_scale), weight_TK, expert_TK)


@pytest.mark.parametrize("renormalize", [True, False])
def test_as_deepseek_v3_does_it(renormalize: bool) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = SimpleNamespace(
        hidden_size=EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        routed_scaling_factor=2.5,
        n_group=4,
        topk_group=2,
        norm_topk_prob=renormalize,
    )
    router = with_logits(DeepseekV3TopkRouter(config))
    router.e_score_correction_bias = torch.randn(EXPERTS)
    logits_TE = 3 * torch.randn(TOKENS, EXPERTS)
    _, weight_TK, expert_TK = router(logits_TE)
    found = route(
        logits_TE,
        TOP_K,
        score="sigmoid",
        renormalize=renormalize,
        select_bias_E=router.e_score_correction_bias,
        num_groups=4,
        top_groups=2,
        scaling=2.5,
    )
    check(found, weight_TK, expert_TK)


def test_as_ernie4_5_does_it() -> None:
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter

    config = SimpleNamespace(hidden_size=EXPERTS, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_norm_min=1e-12)
    router = with_logits(Ernie4_5_MoeTopKRouter(config))
    router.moe_statics.e_score_correction_bias.data = 0.1 * torch.randn(1, EXPERTS)
    logits_TE = 3 * torch.randn(TOKENS, EXPERTS)
    _, weight_TK, expert_TK = router(logits_TE)
    bias_E = router.moe_statics.e_score_correction_bias[0]
    check(route(logits_TE, TOP_K, select_bias_E=bias_E), weight_TK, expert_TK)
    assert not torch.equal(route(logits_TE, TOP_K)[1], route(logits_TE, TOP_K, select_bias_E=bias_E)[1])


def test_groups_without_bias_count_by_their_best_expert() -> None:
    logits_TE = torch.tensor([[9.0, 0.0, 5.0, 5.0, 8.0, 1.0]])  # groups (9 0) (5 5) (8 1)
    _, expert_TK = route(logits_TE, 4, num_groups=3, top_groups=2)
    assert expert_TK.tolist() == [[0, 4, 5, 1]]


def test_best_expert_first_and_a_tie_goes_to_the_lowest_id() -> None:
    logits_TE = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0, -0.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _, expert_TK = route(logits_TE.to(dtype), 4)
        assert expert_TK.tolist() == [[1, 3, 5, 0], [0, 1, 2, 3]]


def test_ties_among_many_experts() -> None:
    """An unstable sort keeps the order of few ties by luck; of 512 it does not."""
    logits_TE = torch.randint(0, 3, (20, 512)).float()
    _, expert_TK = route(logits_TE, 16)
    for row, experts in zip(logits_TE.tolist(), expert_TK.tolist()):
        assert experts == sorted(range(512), key=lambda e: (-row[e], e))[:16]


def test_logits_below_bf16_resolution_are_separated() -> None:
    near = torch.tensor([[1.0, 1.0, 1.0 + 2**-20, 0.0]])
    assert near.bfloat16()[0, 2] == 1.0
    assert route(near, 1)[1].tolist() == [[2]]
    # So near that even their fp32 probabilities are equal, and yet the choice is not left to the id.
    nearest = torch.tensor([[0.0, 1e-10, 0.0]])
    assert nearest.softmax(-1).unique().numel() == 1
    assert route(nearest, 1)[1].tolist() == [[1]]


def test_a_zero_denominator_gives_zero_weights() -> None:
    nothing = torch.full((2, 6), float("-inf"))
    assert route(nothing, 2)[0].tolist() == [[0.0, 0.0]] * 2
    assert route(nothing, 2, renormalize=False)[0].tolist() == [[0.0, 0.0]] * 2
    assert route(nothing, 2, score="sigmoid", scaling=2.5)[0].tolist() == [[0.0, 0.0]] * 2
    assert route(nothing, 2)[1].tolist() == [[0, 1]] * 2


def test_padded_rows_go_to_no_expert() -> None:
    logits_TE = torch.randn(5, 8)
    alone = route(logits_TE[:3], 2)
    logits_TE[3:] = float("nan")
    weight_TK, expert_TK = route(logits_TE, 2, num_tokens=torch.tensor(3))
    assert torch.equal(weight_TK[:3], alone[0]) and torch.equal(expert_TK[:3], alone[1])
    assert weight_TK[3:].tolist() == [[0.0, 0.0]] * 2
    assert expert_TK[3:].tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_tokens(score: str) -> None:
    weight_TK, expert_TK = route(torch.zeros(0, 8), 2, score=score, num_groups=2)
    assert (weight_TK.shape, weight_TK.dtype) == ((0, 2), torch.float32)
    assert (expert_TK.shape, expert_TK.dtype) == ((0, 2), torch.int32)


def test_unknown_score() -> None:
    with pytest.raises(ValueError, match=r"unknown router score 'tanh' \(known: softmax, sigmoid\)"):
        route(torch.zeros(1, 2), 1, score="tanh")
