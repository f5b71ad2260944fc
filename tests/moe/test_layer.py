"""One MoE layer: the order of its work on two streams, its input left alone, its result against a loop over tokens."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from anabranch import kernels, ops, platforms
from anabranch.moe import setup as moe_setup
from anabranch.moe.config import MoEConfig
from anabranch.moe.dispatch import Dispatched, LocalDispatcher
from anabranch.moe.layer import MoELayer
from anabranch.moe.setup import MoESetup, make_setup
from anabranch.platforms.fake import FakePlatform, FakeSideStream

WIDTH, TOKENS = 12, 7
ROUTED = MoEConfig(num_experts=5, top_k=2, width=6, renormalize=True)
SHARED = dataclasses.replace(ROUTED, shared_width=10, renormalize=False)
GATED = dataclasses.replace(SHARED, shared_gate=True)
BIASED = dataclasses.replace(ROUTED, score="sigmoid", selection_bias=True, scaling=2.5)
CONFIGS = {"routed only": ROUTED, "shared": SHARED, "gated shared": GATED, "biased sigmoid": BIASED}


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlatform]:
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)
    fake = FakePlatform()
    before = {name: (op.bound, op.forced) for name, op in ops.OPS.items()}
    kernels.bind(fake)
    yield fake
    for name, (bound, forced) in before.items():
        ops.OPS[name].bound, ops.OPS[name].forced = bound, forced


def make_layer(config: MoEConfig, platform: FakePlatform, setup: MoESetup | None = None) -> MoELayer:
    layer = MoELayer(config, WIDTH, "silu", setup or make_setup(platform))
    for parameter in layer.parameters():
        parameter.data.normal_()
    return layer


def one_token(layer: MoELayer, config: MoEConfig, x_D: torch.Tensor) -> torch.Tensor:
    """The same layer by hand, for one token."""
    logits = layer.router.weight.data @ x_D
    probability = logits.sigmoid() if config.score == "sigmoid" else logits.softmax(-1)
    bias = layer.router.e_score_correction_bias
    expert = (probability if bias is None else probability + bias).topk(config.top_k).indices
    weight = probability[expert]
    if config.renormalize:
        weight = weight / weight.sum()
    weight = weight * config.scaling
    y_D = torch.zeros(WIDTH)
    for w, e in zip(weight, expert.tolist()):
        gate, up = (layer.experts.gate_up_EFD.data[e] @ x_D).chunk(2)
        y_D = y_D + w * (layer.experts.down_EDI.data[e] @ (F.silu(gate) * up))
    if layer.shared_expert is not None:
        gate, up = (layer.shared_expert.gate_up_proj.weight.data @ x_D).chunk(2)
        shared_D = layer.shared_expert.down_proj.weight.data @ (F.silu(gate) * up)
        if layer.shared_expert_gate is not None:
            shared_D = torch.sigmoid(layer.shared_expert_gate.weight.data @ x_D) * shared_D
        y_D = y_D + shared_D
    return y_D


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_a_loop_over_tokens_and_leaves_its_input(config: MoEConfig, platform: FakePlatform) -> None:
    layer = make_layer(config, platform)
    x_TD = torch.randn(TOKENS, WIDTH)
    before = x_TD.clone()
    y_TD = layer(x_TD)
    torch.testing.assert_close(
        y_TD, torch.stack([one_token(layer, config, x_D) for x_D in before]), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(x_TD.view(torch.int32), before.view(torch.int32))
    assert y_TD.data_ptr() != x_TD.data_ptr()


def test_routed_work_is_enqueued_before_the_side_begins(platform: FakePlatform) -> None:
    layer = make_layer(GATED, platform)
    for name in ("router", "experts", "shared_expert", "shared_expert_gate"):
        layer.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: platform.log.append(name))
    layer(torch.randn(TOKENS, WIDTH))
    assert platform.log == [
        "fork",
        "router",
        "experts",
        "side begins",
        "shared_expert",
        "shared_expert_gate",
        "side ends",
        "join",
    ]


@pytest.mark.parametrize("place", ["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_in_a_captured_graph_the_sum_waits_for_both_streams(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either side may take the longer; the layer behind uses memory that this one has let go."""
    chosen = FakePlatform() if place == "fake" else platforms.current()
    for op in ops.OPS.values():  # they are bound again as they were
        monkeypatch.setattr(op, "bound", op.bound)
        monkeypatch.setattr(op, "forced", op.forced)
    kernels.bind(chosen)
    width, tokens = 256, 16
    for shared_width in (64, 8192):
        config = dataclasses.replace(GATED, num_experts=8, width=64, shared_width=shared_width)
        with torch.inference_mode(), chosen.device:
            layers = [MoELayer(config, width, "silu", make_setup(chosen)) for _ in range(3)]
            for layer in layers:
                layer.to(chosen.compute_dtype(torch.bfloat16))
                for parameter in layer.parameters():
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            given = torch.randn(4, tokens, width).to(layers[0].router.weight.dtype)
            x_TD, results = given[0].clone(), list[torch.Tensor]()

            def run(x_TD: torch.Tensor, layers: list[MoELayer] = layers) -> torch.Tensor:
                for layer in layers:
                    x_TD = x_TD + layer(x_TD)
                return x_TD

            with monkeypatch.context() as inline:
                inline.setattr(moe_setup, "OVERLAP_TOKENS", 0)
                expected = [run(one_TD) for one_TD in given]
            run(x_TD)  # compiles what a capture could not
            chosen.synchronize()
            graph = chosen.capture(lambda x=x_TD, kept=results: kept.append(run(x)))
            for one_TD, expected_TD in zip(given, expected):
                x_TD.copy_(one_TD)
                graph.replay()
                torch.testing.assert_close(results[-1], expected_TD, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("config", "widths"), [(SHARED, [WIDTH]), (GATED, [WIDTH, 1])], ids=["shared", "gated shared"])
def test_all_that_is_made_on_the_side_is_handed_over(
    config: MoEConfig, widths: list[int], platform: FakePlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[torch.Tensor] = []
    monkeypatch.setattr(FakeSideStream, "join", lambda self, *results: handed.extend(results))
    make_layer(config, platform)(torch.randn(TOKENS, WIDTH))
    assert [tuple(tensor.shape) for tensor in handed] == [(TOKENS, width) for width in widths]


def test_without_a_shared_expert_nothing_forks(platform: FakePlatform) -> None:
    make_layer(ROUTED, platform)(torch.randn(TOKENS, WIDTH))
    assert platform.log == []


@pytest.mark.parametrize("config", [ROUTED, GATED], ids=["routed only", "gated shared"])
def test_padding_rows_get_nothing_from_routed_experts(config: MoEConfig, platform: FakePlatform) -> None:
    layer = make_layer(config, platform)
    x_TD = torch.randn(TOKENS, WIDTH)
    alone_TD = layer(x_TD[:4])
    y_TD = layer(x_TD, num_tokens=torch.tensor(4, dtype=torch.int32))
    torch.testing.assert_close(y_TD[:4], alone_TD)
    rest_TD = torch.zeros(3, WIDTH)
    if layer.shared_expert is not None:
        rest_TD = (torch.sigmoid(layer.shared_expert_gate(x_TD)) * layer.shared_expert(x_TD))[4:]
    assert torch.equal(y_TD[4:], rest_TD)


def test_padding_rows_may_hold_anything(platform: FakePlatform) -> None:
    x_TD = torch.randn(TOKENS, WIDTH)
    x_TD[4:] = float("nan")
    y_TD = make_layer(ROUTED, platform)(x_TD, num_tokens=torch.tensor(4))
    assert y_TD[:4].isfinite().all()
    assert torch.equal(y_TD[4:], torch.zeros(3, WIDTH))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_tokens(config: MoEConfig, platform: FakePlatform) -> None:
    assert make_layer(config, platform)(torch.zeros(0, WIDTH)).shape == (0, WIDTH)


def test_the_router_may_have_an_input_of_its_own(platform: FakePlatform) -> None:
    layer = make_layer(ROUTED, platform)
    x_TD, other_TD = torch.randn(2, TOKENS, WIDTH)
    _, chosen_TK = layer.router(other_TD, None)
    plans: list[Dispatched] = []
    layer.experts.register_forward_pre_hook(lambda _, arguments: plans.append(arguments[1]))
    layer(x_TD, router_input_TD=other_TD)
    assert torch.equal(plans[0].expert_MK, chosen_TK)


def test_a_plan_is_frozen() -> None:
    x_TD, weight_TK, expert_TK = torch.randn(3, WIDTH), torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32)
    rows_MD, plan = LocalDispatcher().dispatch(x_TD, weight_TK, expert_TK)
    assert rows_MD is x_TD and plan == Dispatched(expert_TK, weight_TK, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_tokens = 4  # type: ignore[misc]
    assert LocalDispatcher().combine(rows_MD, plan) is rows_MD
