"""Fixed tiles: what a row gives has the same bits whatever the number of rows, and is what the reference gives."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import kernels, ops, platforms
from anabranch.conformance import determinism, tiny
from anabranch.conformance.judge import copy, faults

pytest.importorskip("triton")
from anabranch.formats import Grouped, named
from anabranch.kernels.triton import (
    attention,
    experts,
    gated_delta,
    latent_attention,
    launch,
    linear,
    linear_fixed,
    linear_quantized,
    logprobs,
    norm,
    rope_store,
    route,
)
from anabranch.kernels.triton.experts_plan import RowOrder
from anabranch.kernels.tuning import experts_tiles
from anabranch.kernels.tuning.experts_tiles import GroupedTiles, HopperTiles, Machine, Shape
from anabranch.ops.attention import AttentionCall
from anabranch.ops.experts import ExpertsCall
from anabranch.ops.gated_delta import GatedDeltaCall
from anabranch.ops.latent_attention import LatentAttentionCall
from anabranch.ops.route import RouteCall
from anabranch.ops.weight import Weight
from anabranch.platforms.fake import FakePlatform
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere, interpreter
from tests.kernels.triton.test_quantized_experts import quantized

KERNELS: dict[str, Callable[..., Any]] = {
    "attention": attention.attention,
    "experts": experts.experts,
    "gated_delta": gated_delta.gated_delta,
    "latent_attention": latent_attention.latent_attention,
    "linear": linear.linear,
    "linear_heads": linear_fixed.linear_heads,
    "logprobs": logprobs.logprobs,
    "rope_store": rope_store.rope_store,
    "route": route.route,
}
FLOATS16 = (torch.bfloat16, torch.float16)
SIZES = {"cpu": (1, 5, 70), "cuda": (1, 3, 16, 17, 64, 65, 300, 2500)}
"""Rows of a call: alone, few, more than a tile has."""


@pytest.fixture(autouse=True)
def fixed_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "fixed_tiles", True)


@everywhere
@pytest.mark.parametrize("name", KERNELS)
def test_as_the_reference(name: str, device: str) -> None:
    op, num_judged = ops.OPS[name], 0
    for dtype in dtypes(device):
        for label, arguments in op.samples(dtype, torch.Generator().manual_seed(0)):
            accepts = op.kernels["triton"].accepts
            if accepts is None or accepts(**copy(arguments, torch.device(device))):
                num_judged += 1
                assert faults(op, KERNELS[name], arguments, dtype, torch.device(device)) == [], (dtype, label)
    assert num_judged


def check_rows(device: str, compute: Callable[[torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
    """`compute` gets row numbers; what it gives for the first rows must not depend on those that follow."""
    most = max(SIZES[device])
    every = compute(torch.arange(most, device=device))
    for size in SIZES[device]:
        for begin in (0, most - size):
            some = compute(torch.arange(begin, begin + size, device=device))
            for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (every, some)), strict=True):
                assert torch.equal(one[begin : begin + size], other), f"{size} rows from {begin} on, alone"


def normal(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)


in_any_dtype = pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=interpreter),
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.float32, *FLOATS16)),
    ],
)


@in_any_dtype
def test_rows_of_linear(device: str, dtype: torch.dtype) -> None:
    D, F = (96, 40) if device == "cpu" else (2048, 1040)
    x_TD = normal(max(SIZES[device]), D, device=device, dtype=dtype)
    weight, bias_F = Weight.of(normal(F, D, device=device, dtype=dtype)), normal(F, device=device, dtype=dtype)
    check_rows(device, lambda rows: linear.linear(x_TD[rows], weight, bias_F, torch.float32))
    heads_HDF = normal(4, D // 4, 24, device=device, dtype=dtype)
    check_rows(device, lambda rows: linear_fixed.linear_heads(x_TD[rows].view(-1, 4, D // 4), heads_HDF))


@in_any_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_experts(device: str, dtype: torch.dtype, bias: bool) -> None:
    E, D, inner, K = (4, 32, 16, 2) if device == "cpu" else (32, 1024, 768, 4)
    T = max(SIZES[device])
    x_TD = normal(T, D, device=device, dtype=dtype)
    gate_up, down = (Weight.of(normal(*s, device=device, dtype=dtype)) for s in ((E, 2 * inner, D), (E, D, inner)))
    expert_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(device, torch.int32)
    weight_TK = normal(T, K, device=device).softmax(-1)
    shapes = {"gate_up_bias_EF": (E, 2 * inner), "down_bias_ED": (E, D)} if bias else {}
    biases: dict[str, Any] = {name: normal(*shape, device=device, dtype=dtype) for name, shape in shapes.items()}

    def compute(rows: torch.Tensor) -> torch.Tensor:
        call = ExpertsCall(x_TD[rows], weight_TK[rows], expert_TK[rows], gate_up, down, "silu", **biases)
        return experts.experts(call)

    check_rows(device, compute)


QUANTIZED = ("fp8_128x128", "fp8_1x0", "int8_1x0", "int4_1x128_bf16", "int4_1x32_f16_zero", "fp4_1x32_e8m0")
QUICK = ("int8_1x0", "int4_1x32_f16_zero", "fp4_1x32_e8m0")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in QUANTIZED]
)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float32, marks=interpreter),
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in FLOATS16),
    ],
)
def test_rows_of_quantised_weights(name: str, device: str, dtype: torch.dtype) -> None:
    """Weights alone are quantised, and multiplied in the same way, whatever the number of tokens."""
    format = named(name)
    assert isinstance(format, Grouped)
    D, inner, E, K = (2 * (format.group or 64), format.group or 64, 3, 2) if device == "cpu" else (1024, 512, 8, 2)
    T = max(SIZES[device])
    x_TD = normal(T, D, device=device, dtype=dtype)
    weight = quantized(Weight.of(normal(inner, D, device=device) * D**-0.5), format)
    assert linear.accepts(x_TD, weight)
    check_rows(device, lambda rows: linear.linear(x_TD[rows], weight))
    shapes = (E, 2 * inner, D), (E, D, inner)
    gate_up, down = (
        quantized(Weight.of(normal(*shape, device=device) * shape[-1] ** -0.5), format) for shape in shapes
    )
    expert_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)]).to(device, torch.int32)
    weight_TK = normal(T, K, device=device).softmax(-1)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        call = ExpertsCall(x_TD[rows], weight_TK[rows], expert_TK[rows], gate_up, down, "silu")
        assert experts.accepts(call)
        return experts.experts(call)

    check_rows(device, compute)


@in_any_dtype
def test_rows_of_norms(device: str, dtype: torch.dtype) -> None:
    D = 64 if device == "cpu" else 2048
    x_TD, weight_D = normal(max(SIZES[device]), D, device=device, dtype=dtype), normal(D, device=device, dtype=dtype)
    check_rows(device, lambda rows: norm.rms_norm(x_TD[rows], weight_D, 1e-6))
    check_rows(device, lambda rows: norm.add_rms_norm(x_TD[rows], x_TD[rows], weight_D, 1e-6, fp8=True))


@everywhere
def test_rows_of_route_and_logprobs(device: str) -> None:
    most, E, V = max(SIZES[device]), 60, 300 if device == "cpu" else 151_936
    logits_TE = normal(most, E, device=device)
    check_rows(device, lambda rows: route.route(RouteCall(logits_TE[rows], 4, renormalize=False)))
    logits_TV = normal(most, V, device=device)
    token_T = torch.arange(most, device=device)
    check_rows(device, lambda rows: logprobs.logprobs(logits_TV[rows], token_T[rows], 1))


@everywhere
def test_many_alternatives_do_not_change_a_log_probability(device: str) -> None:
    """Rows of a step get as many as one of them asks for."""
    logits_TV, token_T = normal(2, 300, device=device), torch.arange(2, device=device)
    assert logprobs.accepts(logits_TV, token_T, 100)
    few, many = (logprobs.logprobs(logits_TV, token_T, n) for n in (1, 70))
    assert torch.equal(few[0], many[0]) and torch.equal(few[3], many[3][:, :1])


@in_any_dtype
@pytest.mark.parametrize("D", [32, pytest.param(128, marks=pytest.mark.gpu), pytest.param(256, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [0, 24])
def test_rows_of_attention(device: str, dtype: torch.dtype, window: int, D: int) -> None:
    """A request's tokens in chunks of any size, with and without others before them."""
    if device == "cpu" and D > 32:
        pytest.skip("on a GPU")
    S, H, G, length = 8, 4, 2, 90 if device == "cpu" else 900
    pages = -(-length // S)
    k_PSGD, v_PSGD = (normal(pages * 2, S, G, D, device=device, dtype=dtype) for _ in range(2))
    q_THD = normal(length, H, D, device=device, dtype=dtype)
    table_RM = torch.randperm(2 * pages).view(2, pages).to(device, torch.int32)

    def attend(begin: int, end: int, others: int) -> torch.Tensor:
        """Tokens begin .. end of request 1, after the last `others` tokens of request 0."""
        rows = [*range(length - others, length), *range(begin, end)]
        starts, lengths = ([0, others, len(rows)], [length, end]) if others else ([0, len(rows)], [end])
        integers = [torch.tensor(x, dtype=torch.int32, device=device) for x in (starts, lengths)]
        table = table_RM if others else table_RM[1:]
        call = AttentionCall(
            q_THD[rows], k_PSGD, v_PSGD, table.contiguous(), *integers,
            scale=D**-0.5, window=window, max_query=max(others, end - begin),
        )  # fmt: skip
        return attention.attention(call)[others:]

    whole = attend(0, length, 0)
    for begin, end, others in ((length - 1, length, 0), (length - 1, length, 1), (length - 37, length - 5, 3)):
        assert torch.equal(whole[begin:end], attend(begin, end, others)), (begin, end, others)


@in_any_dtype
def test_rows_of_latent_attention(device: str, dtype: torch.dtype) -> None:
    S, (H, L, F, length) = 8, (4, 32, 16, 70) if device == "cpu" else (16, 512, 64, 700)
    rows_PSC = normal(-(-length // S), S, L + F, device=device, dtype=dtype)
    q_THL, turned_THF = (normal(length, H, n, device=device, dtype=dtype) for n in (L, F))
    table_RM = torch.arange(rows_PSC.shape[0], dtype=torch.int32, device=device).view(1, -1)

    def attend(begin: int, end: int) -> torch.Tensor:
        integers = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, end - begin], [end])]
        q = q_THL[begin:end], turned_THF[begin:end]
        call = LatentAttentionCall(*q, rows_PSC, table_RM, *integers, scale=0.2, max_query=end - begin)
        return latent_attention.latent_attention(call)

    whole = attend(0, length)
    for begin in (length - 1, length - 30, 3):
        assert torch.equal(whole[begin:], attend(begin, length)), begin


@in_any_dtype
def test_rows_of_gated_delta(device: str, dtype: torch.dtype) -> None:
    """A prompt at once, in two parts, and its last token alone: results, and the states that they leave."""
    G, H, W, (K, V, length) = 1, 2, 4, (16, 16, 20) if device == "cpu" else (128, 128, 150)
    C = 2 * G * K + H * V
    x_TX = normal(length, C + H * V + 2 * H, device=device, dtype=dtype)
    parameters = [normal(*shape, device=device) for shape in ((C, W), (H,), (H,), (V,))]
    page_R = torch.zeros(1, dtype=torch.int32, device=device)

    def compute(*ends: int) -> tuple[torch.Tensor, ...]:
        conv_PLC, state_PHKV = torch.zeros(1, W - 1, C, device=device), torch.zeros(1, H, K, V, device=device)
        parts = []
        for begin, end in pairwise((0, *ends)):
            integers = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, end - begin], [end])]
            call = GatedDeltaCall(x_TX[begin:end], conv_PLC, state_PHKV, page_R, *integers, *parameters, 1e-6, G)
            parts.append(gated_delta.gated_delta(call))
        return torch.cat(parts), conv_PLC, state_PHKV

    whole = compute(length)
    for ends in ((7, length), (length - 1, length)):
        for one, other in zip(whole, compute(*ends), strict=True):
            assert torch.equal(one, other), ends


@in_any_dtype
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("cut", [1, 2, 7])
def test_a_cut_of_gated_delta(device: str, dtype: torch.dtype, before: int, cut: int) -> None:
    """What the page of the cut holds is what a step to there leaves, and the rest as without it."""
    G, H, W, (K, V, length) = 1, 2, 4, (16, 16, 9) if device == "cpu" else (128, 128, 150)
    C = 2 * G * K + H * V
    x_TX = normal(length, C + H * V + 2 * H, device=device, dtype=dtype)
    parameters = [normal(*shape, device=device) for shape in ((C, W), (H,), (H,), (V,))]
    kept = normal(3, W - 1, C, device=device), normal(3, H, K, V, device=device)

    def compute(end: int, cut: int = 0) -> tuple[torch.Tensor, ...]:
        conv_PLC, state_PHKV = (x.clone() for x in kept)
        integers = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([1], [0, end], [before + end])]
        cuts = [torch.tensor([x], dtype=torch.int32, device=device) for x in (cut, 2)] if cut else [None, None]
        call = GatedDeltaCall(x_TX[:end], conv_PLC, state_PHKV, *integers, *parameters, 1e-6, G, 0, *cuts)
        return gated_delta.gated_delta(call), conv_PLC, state_PHKV

    whole, part, found = compute(length), compute(cut), compute(length, cut)
    assert torch.equal(found[0], whole[0])
    for one, other, to_the_cut in zip(found[1:], whole[1:], part[1:], strict=True):
        assert torch.equal(one[:2], other[:2]) and torch.equal(one[2], to_the_cut[1])


@pytest.mark.parametrize("machine", ["any", "hopper", "hopper without Gluon"])
def test_tiles_of_experts_use_one_matrix_unit(machine: str) -> None:
    """Hopper's wide one, with 64 rows of tokens or of weights, or never. Elsewhere there is one tile."""
    chip = Machine(226 << 10, 132, machine != "any", machine == "hopper", fixed=True)
    shape = Shape(128, 2048, 768, 8, torch.bfloat16)
    counts = (1, 8, 64, 65, 8192)
    found = {experts_tiles.choose(tokens, shape, how, chip) for tokens in counts for how in ("fused", "fastest")}
    if machine != "hopper":
        assert len(found) == 1
    for tiles in found:
        if isinstance(tiles, GroupedTiles):
            assert not tiles.add and not tiles.match and (tiles.rows >= 64 or tiles.gate_up.swap or machine == "any")
        else:
            assert isinstance(tiles, HopperTiles) and not tiles.extra


UNITS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}


@pytest.mark.parametrize("target", UNITS)
def test_products_use_one_matrix_unit(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of tokens, the compiler takes the same one: then the order of sums is the same."""
    hopper, fp8_unit = target == "sm_90", target != "sm_80"
    chip = Machine(ahead_of_time.SHARED[target], 132, hopper, False, fixed=True)
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: target in ahead_of_time.DEPENDENT)
    for module in (linear, linear_fixed, linear_quantized, experts):
        monkeypatch.setattr(module, "machine_of", lambda device: chip)
    x_TD, weight_FD = torch.empty(500, 512, dtype=torch.bfloat16), torch.empty(256, 512, dtype=torch.bfloat16)
    monkeypatch.setattr(experts, "order_rows", lambda call, *_: RowOrder(*(call.expert_TK,) * 4, 4))
    small, calls = Weight.of(weight_FD), []
    with recorded(linear_fixed, "multiply_fixed") as launches:
        for tokens in (1, 33, 500):
            linear.linear(x_TD[:tokens], small)
    calls += launches
    if fp8_unit:
        fp8 = {"data": weight_FD.to(torch.float8_e4m3fn), "scale": torch.empty(2, 4)}
        with recorded(linear_quantized, "multiply_scaled") as launches:
            for tokens in (1, 500):
                linear.linear(x_TD[:tokens], Weight.view(named("fp8_128x128"), (256, 512), fp8))
        calls += launches
    gate_up, down = (Weight.of(torch.empty(s, dtype=torch.bfloat16)) for s in ((4, 512, 512), (4, 512, 256)))
    for tokens in (1, 64, 500):
        expert_TK = torch.zeros(tokens, 2, dtype=torch.int32)
        call = ExpertsCall(x_TD[:tokens], torch.empty(tokens, 2), expert_TK, gate_up, down, "silu")
        with (
            recorded(experts, "gate_up_grouped", "down_grouped", "sum_rows") as launches,
            monkeypatch.context() as patch,
        ):
            patch.setattr(experts, "order_rows", lambda call, *_: RowOrder(*(call.expert_TK,) * 4, 4))
            experts.experts(call)
        calls += launches[:2]
    assert len(calls) == 3 + 2 * fp8_unit + 6
    for call in calls:
        compiled = compile_for(target, call)
        assert {unit for unit in UNITS.values() if unit in compiled.asm["ptx"]} == {UNITS[target]}
        assert not hopper or ahead_of_time.resources(compiled)["LOCAL"] == 0


@interpreter
@pytest.mark.slow
def test_an_engine_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any batch, in chunks, with a cached prefix, after preemption and with drafts, as on a GPU but for captures."""

    class Gpu(FakePlatform):
        name = "cuda"
        providers = {"triton": "anabranch.kernels.triton", "torch": "anabranch.kernels.torch"}
        deterministic = True
        graph_mode = "none"

    monkeypatch.setattr(platforms, "current", Gpu)
    monkeypatch.setattr(kernels, "compile_ahead", lambda platform, work: None)
    monkeypatch.setattr(determinism, "LENGTHS", (1, 24, 7))
    monkeypatch.setattr(determinism, "ANSWER", 9)
    tiny.write("qwen3_5_moe", tmp_path)
    try:
        options = {"dtype": "float32", "page_size": 4, "max_num_batched_tokens": 64}
        results = list(determinism.check_determinism(str(tmp_path), **options))
    finally:
        monkeypatch.undo()
        kernels.bind(platforms.current())
    assert len(results) == 8 and not [result for result in results if not result.passed], results
