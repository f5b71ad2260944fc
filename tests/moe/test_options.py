"""Ways to compute a MoE layer: the same result, whatever is chosen; what cannot be done is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.config import CHOICES, EngineConfig
from anabranch.engine.single import SingleSequence
from anabranch.loader.checkpoint import CheckpointError, read_checkpoint
from anabranch.loader.load import load_model
from anabranch.models.config import MoEConfig
from anabranch.moe.options import MoEOptions, apply
from anabranch.moe.shared_expert import SIDE_TOKENS
from anabranch.ops.experts import COMBINES
from anabranch.platforms.fake import FakePlatform
from tests.models import tiny
from tests.moe.test_layer import GATED, ROUTED, SHARED, TOKENS, WIDTH, make_layer, platform

__all__ = ["platform"]  # a fixture

PACKABLE = {
    "shared": dataclasses.replace(SHARED, shared_width=3 * ROUTED.width),
    "gated shared": dataclasses.replace(GATED, shared_width=ROUTED.width),
}


@pytest.mark.parametrize("config", PACKABLE.values(), ids=PACKABLE)
def test_a_packed_shared_expert_gives_the_same_result(config: MoEConfig, platform: FakePlatform) -> None:
    plain, packed = make_layer(config, platform), make_layer(config, platform)
    apply(MoEOptions(shared_expert="packed"), packed)
    count = config.shared_width // config.width
    assert packed.shared_expert is None and packed.experts.down_EDI.shape[0] == config.num_experts + count
    given = dict(plain.named_parameters())
    for name, parameter in packed.named_parameters():
        if not name.startswith("experts."):
            parameter.data.copy_(given[name])
    for name, spelled in packed.experts.layouts().items():
        for piece in spelled[0]:  # fused experts, then parts of the shared one
            source = given[f"experts.{name}"]
            if piece.part:
                gate_up, down = plain.shared_expert.gate_up_proj.weight, plain.shared_expert.down_proj.weight
                gate, up = gate_up.chunk(2)
                source = {"gate": gate, "up_p": up, "down": down}[piece.name.split(".")[1][:4]]
            packed.get_parameter(f"experts.{name}").data[piece.index].copy_(source[piece.part])
    x_TD = torch.randn(TOKENS, WIDTH)
    seen: list[torch.Tensor] = []
    packed.watch = seen.append
    platform.log.clear()
    torch.testing.assert_close(packed(x_TD), plain(x_TD), rtol=1e-4, atol=1e-4)
    assert platform.log == ["fork", "side begins", "side ends", "join"]  # the plain one's
    assert seen[0].shape == (TOKENS, config.top_k), "whoever watches sees routed experts only"
    x_TD[4:] = float("nan")
    plans: list[Any] = []
    packed.experts.register_forward_pre_hook(lambda _, arguments: plans.append(arguments[1]))
    y_TD = packed(x_TD, num_tokens=torch.tensor(4, dtype=torch.int32))
    assert (plans[0].expert_MK[4:] == -1).all() and (plans[0].weight_MK[4:] == 0).all()
    torch.testing.assert_close(y_TD[:4], plain(x_TD)[:4], rtol=1e-4, atol=1e-4)
    assert torch.equal(y_TD[4:], torch.zeros(3, WIDTH)), "padding rows visit nobody"


def test_what_cannot_be_packed_is_refused(platform: FakePlatform) -> None:
    with pytest.raises(ValueError, match="its width, 10, is not a multiple of an expert's, 6; use stream"):
        apply(MoEOptions(shared_expert="packed"), make_layer(GATED, platform))
    with pytest.raises(ValueError, match="no shared expert"):
        apply(MoEOptions(shared_expert="packed"), make_layer(ROUTED, platform))


def test_inline_forks_nothing(platform: FakePlatform) -> None:
    plain, inline = make_layer(GATED, platform), make_layer(GATED, platform)
    inline.load_state_dict(plain.state_dict())
    apply(MoEOptions(shared_expert="inline"), inline)
    x_TD = torch.randn(TOKENS, WIDTH)
    y_TD = inline(x_TD)
    assert platform.log == []
    assert torch.equal(y_TD, plain(x_TD))


def test_many_tokens_do_not_fork(platform: FakePlatform) -> None:
    layer = make_layer(GATED, platform)
    apply(MoEOptions(shared_expert="stream"), layer)
    for tokens, forks in ((SIDE_TOKENS, 1), (SIDE_TOKENS + 1, 0)):
        platform.log.clear()
        layer(torch.randn(tokens, WIDTH))
        assert platform.log.count("fork") == forks


def test_two_layers_may_combine_differently(platform: FakePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    real = ops.experts.bound[0].function
    spy = dataclasses.replace(
        ops.experts.bound[0],
        function=lambda *args, **kwargs: [seen.append(kwargs["combine"]), real(*args, **kwargs)][1],
    )
    monkeypatch.setattr(ops.experts, "bound", (spy,))
    layers = [make_layer(ROUTED, platform) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    apply(MoEOptions(combine="ordered"), layers[1])
    x_TD = torch.randn(TOKENS, WIDTH)
    torch.testing.assert_close(layers[0](x_TD), layers[1](x_TD))
    assert seen == ["fastest", "ordered"]


@pytest.mark.parametrize("experts", ["split", "fused"])
def test_a_shared_expert_is_packed_while_it_is_loaded(experts: Any, tmp_path: Path) -> None:
    """The same logits as with the shared expert apart, from either spelling; every byte counted once."""
    settings = tiny.QWEN2_MOE | {"shared_expert_intermediate_size": 4 * 24}
    case = tiny.Case(name="packed", model_type="qwen2_moe", seed=3, settings=settings, experts=experts)
    folder = tiny.save(case, tmp_path / "model")
    calls: list[tuple[int, int]] = []
    apart = load_model(folder, dtype="float32")
    packed = load_model(
        folder,
        dtype="float32",
        moe=MoEOptions(shared_expert="packed"),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert not any("shared_expert." in name for name, _ in packed.named_parameters())
    assert packed.layers[0].mlp.experts.down_EDI.shape[0] == 6 + 4
    assert calls[-1][0] == calls[-1][1] == read_checkpoint(folder).num_bytes
    tokens = tiny.prompt(case)
    logits = [SingleSequence(model, 64).forward(tokens) for model in (apart, packed)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_shared_expert_of_another_width_is_not_packed(tmp_path: Path) -> None:
    settings = tiny.QWEN2_MOE | {"shared_expert_intermediate_size": 4 * 24}
    folder = tiny.save(tiny.Case(name="other", model_type="qwen2_moe", settings=settings), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["shared_expert_intermediate_size"] = 3 * 24
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"shared_expert\..*has shape \[.*\], config.json asks for"):
        load_model(folder, moe=MoEOptions(shared_expert="packed"))


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
    rows_TKD = experts(x_TD, weight_TK, expert_TK, *weights, "silu", combined=False)
    for combine in ("ordered", "unfused"):
        y_TD = experts(x_TD, weight_TK, expert_TK, *weights, "silu", combine=combine)
        assert torch.equal(y_TD, rows_TKD.sum(1))
