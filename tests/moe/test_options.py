"""Ways to compute a MoE layer: the same result, whatever is chosen; what cannot be done is refused."""

import dataclasses
from pathlib import Path

import pytest
import torch

from anabranch import ops
from anabranch.config import CHOICES, EngineConfig
from anabranch.moe.setup import OVERLAP_TOKENS, make_setup
from anabranch.ops.experts import COMBINES
from anabranch.ops.weight import Weight
from anabranch.platforms.fake import FakePlatform
from tests.models import tiny
from tests.moe.test_layer import GATED, ROUTED, TOKENS, WIDTH, make_layer, platform

__all__ = ["platform"]  # a fixture


def test_inline_forks_nothing(platform: FakePlatform) -> None:
    plain = make_layer(GATED, platform, make_setup(platform, shared_expert="stream"))
    inline = make_layer(GATED, platform, make_setup(platform, shared_expert="inline"))
    inline.load_state_dict(plain.state_dict())
    x_TD = torch.randn(TOKENS, WIDTH)
    y_TD = inline(x_TD)
    assert platform.log == []
    assert torch.equal(y_TD, plain(x_TD))


def test_many_tokens_do_not_fork(platform: FakePlatform) -> None:
    layer = make_layer(GATED, platform)
    for tokens, forks in ((OVERLAP_TOKENS, 1), (OVERLAP_TOKENS + 1, 0)):
        platform.log.clear()
        layer(torch.randn(tokens, WIDTH))
        assert platform.log.count("fork") == forks


def test_two_layers_may_combine_differently(platform: FakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = ops.experts.bound[0].function
    spy = dataclasses.replace(
        ops.experts.bound[0],
        function=lambda call: [seen.append(call.combine), real(call)][1],
    )
    monkeypatch.setattr(ops.experts, "bound", (spy,))
    layers = [make_layer(ROUTED, platform, make_setup(platform, combine=combine)) for combine in ("fastest", "ordered")]
    layers[1].load_state_dict(layers[0].state_dict())
    x_TD = torch.randn(TOKENS, WIDTH)
    torch.testing.assert_close(layers[0](x_TD), layers[1](x_TD))
    assert seen == ["fastest", "ordered"]


def test_the_engine_knows_the_same_ways_to_combine() -> None:
    assert CHOICES["moe_combine"] == ("auto", *COMBINES)
    with pytest.raises(ValueError, match="one of auto, fastest, fused, ordered, unfused, not 'fussed'"):
        EngineConfig(model="x", moe_combine="fussed")


@pytest.mark.parametrize("combine", COMBINES)
def test_every_way_to_combine_gives_the_same_text(combine: str, tmp_path: Path) -> None:
    from anabranch.llm import LLM, SamplingParams

    case = next(c for c in tiny.CASES if c.model_type == "qwen2_moe")
    folder = tiny.save(case, tmp_path / "model")
    with LLM(str(folder), moe_combine=combine, max_num_seqs=2) as llm:
        experts = [m for m in llm.engine.runner.model.modules() if hasattr(m, "combine")]
        assert experts and {m.combine for m in experts} == {combine}
        found = llm.generate([tiny.prompt(case)], SamplingParams(temperature=0, max_tokens=8))[0]
    with LLM(str(folder), max_num_seqs=2) as llm:
        assert (
            found.token_ids
            == llm.generate([tiny.prompt(case)], SamplingParams(temperature=0, max_tokens=8))[0].token_ids
        )


def test_rows_are_summed_in_the_order_of_their_slots_on_request() -> None:
    """The torch kernel writes rows and sums them where order is asked for: bit for bit the plain sum."""
    from anabranch.kernels.torch.experts import experts

    x_TD, weight_TK = torch.randn(9, 16), torch.rand(9, 3)
    expert_TK = torch.rand(9, 5).argsort(-1)[:, :3].int()
    weights = torch.randn(5, 24, 16), torch.randn(5, 16, 12)
    call = ops.ExpertsCall(x_TD, weight_TK, expert_TK, *map(Weight.of, weights), "silu")
    rows_TKD = experts(call._replace(combined=False))
    for combine in ("ordered", "unfused"):
        y_TD = experts(call._replace(combine=combine))
        assert torch.equal(y_TD, rows_TKD.sum(1))
