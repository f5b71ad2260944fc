"""The fused router against its reference, expert ids exactly: in Triton's interpreter, on a GPU, ahead of time."""

import math
from typing import Any

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.kernels.triton import route as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.places import DEVICES, dtypes, everywhere

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

in_any_dtype = pytest.mark.parametrize(
    ("dtype", "device"),
    [
        pytest.param(dtype, *place.values, marks=place.marks, id=f"{dtype}-{place.values[0]}")
        for place in DEVICES
        for dtype in DTYPES
        if DTYPES[dtype] in dtypes(*place.values)
    ],
)
few_and_many = pytest.mark.parametrize("few_rows", [10**9, 0], ids=["few", "many"])


def draw(tokens: int, num_experts: int, dtype: str, device: str) -> torch.Tensor:
    return (2 * torch.randn(tokens, num_experts)).to(device, DTYPES[dtype])


def check(logits_TE: torch.Tensor, top_k: int, **options: Any) -> None:
    assert kernel.accepts(ops.RouteCall(logits_TE, top_k, **options))
    before = logits_TE.clone()
    weight_TK, expert_TK = kernel.route(ops.RouteCall(logits_TE, top_k, **options))
    expected_weight_TK, expected_expert_TK = ops.route.reference(ops.RouteCall(logits_TE, top_k, **options))
    assert (weight_TK.dtype, expert_TK.dtype) == (torch.float32, torch.int32)
    torch.testing.assert_close(expert_TK, expected_expert_TK, rtol=0, atol=0)
    torch.testing.assert_close(weight_TK, expected_weight_TK, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(logits_TE, before, rtol=0, atol=0, equal_nan=True)


VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "per-expert scale": {"expert_scale_E": True},
    "not renormalised": {"renormalize": False, "scaling": 2.0},
    "softmax, bias": {"select_bias_E": True},
    "softmax, bias, not renormalised": {"select_bias_E": True, "renormalize": False},
    "softmax, groups": {"num_groups": 4, "top_groups": 2},
    "sigmoid": {"score": "sigmoid"},
    "sigmoid, not renormalised": {"score": "sigmoid", "renormalize": False},
    "sigmoid, bias, groups": {
        "score": "sigmoid",
        "select_bias_E": True,
        "num_groups": 4,
        "top_groups": 2,
        "scaling": 2.5,
        "expert_scale_E": True,
    },
    "groups of one": {"score": "sigmoid", "select_bias_E": True, "num_groups": 20, "top_groups": 7},
}


def fill_in(options: dict[str, Any], num_experts: int, device: str) -> dict[str, Any]:
    return {name: torch.rand(num_experts, device=device) if name.endswith("_E") else x for name, x in options.items()}


@in_any_dtype
@few_and_many
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str, few_rows: int, dtype: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_ROWS", few_rows)
    if device == "cpu" and dtype != "fp32" and not few_rows:
        pytest.skip("to save time")
    num_experts = 20 if variant == "groups of one" else 60
    for tokens in (3,) if device == "cpu" else (1, 33, 2048):
        options = fill_in(VARIANTS[variant], num_experts, device)
        check(draw(tokens, num_experts, dtype, device), 4, **options)
        if device == "cuda":
            check(draw(tokens, num_experts, dtype, device), 4, **options, num_tokens=torch.tensor(3, device=device))


@in_any_dtype
@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(2, 1), (2, 2), (8, 3), (60, 4), (100, 6), (128, 8), (384, 8), (512, 16), (17, 16)]
)
def test_sizes(num_experts: int, top_k: int, dtype: str, device: str) -> None:
    scale_E = torch.rand(num_experts, device=device)
    for tokens in (0, 2) if device == "cpu" else (0, 1, 2, 33, 222, 2048, 70000):
        check(draw(tokens, num_experts, dtype, device), top_k, expert_scale_E=scale_E)


@in_any_dtype
@few_and_many
def test_ties_go_to_the_lowest_id(few_rows: int, dtype: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_ROWS", few_rows)
    tokens = 2 if device == "cpu" else 500
    like = draw(1, 1, dtype, device)
    levels = torch.randint(-1, 2, (tokens, 100)).to(like)  # three values, zero among them
    check(torch.where(torch.rand(tokens, 100).to(device) < 0.5, -levels, levels), 8)  # −0.0 too
    check(torch.where(levels < 0, float("-inf"), levels), 8)
    check(torch.full((tokens, 100), float("-inf")).to(like), 8)
    check(like.new_zeros(tokens, 100), 8, score="sigmoid")
    check(100 + 5 * draw(tokens, 100, dtype, device), 8, score="sigmoid")  # every probability is 1


@everywhere
@few_and_many
@pytest.mark.parametrize("top_k", [7, 8])
def test_fp32_logits_that_differ_below_bf16(
    top_k: int, few_rows: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbouring floats: whatever bits a key gives up for the expert id, they decide here. Also across the last
    place that is chosen, and with exact ties among them."""
    monkeypatch.setattr(kernel, "FEW_ROWS", few_rows)
    tokens = 2 if device == "cpu" else 1000
    for spread in (40,) if device == "cpu" else (1, 40, 5000):
        steps = torch.randint(0, spread, (tokens, 128), dtype=torch.int32)
        logits_TE = (torch.tensor(3.0).view(torch.int32) + steps).view(torch.float32).to(device)
        check(logits_TE, top_k)
        check(-logits_TE, top_k)
        check(logits_TE, top_k, select_bias_E=torch.zeros(128, device=device))
    distinct = (torch.tensor(3.0).view(torch.int32) + torch.randperm(128).int()).view(torch.float32)[None].to(device)
    assert distinct.bfloat16().unique().numel() == 1
    check(distinct, top_k)


@in_any_dtype
def test_padding_is_whatever(dtype: str, device: str) -> None:
    logits_TE = draw(7, 60, dtype, device)
    logits_TE[5:] = float("nan")
    for num_tokens in (0, 5):
        check(logits_TE, 4, num_tokens=torch.tensor(num_tokens, dtype=torch.int32, device=device))
        check(logits_TE, 4, num_tokens=torch.tensor([num_tokens], device=device))


@in_any_dtype
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_gives_distinct_experts(sign: int, dtype: str, device: str) -> None:
    rows = 1 if device == "cpu" else 3
    logits_TE = draw(2 * rows, 60, dtype, device)
    logits_TE[:rows] = sign * float("nan")
    logits_TE[rows:, ::7] = sign * float("nan")
    for options in ({}, {"score": "sigmoid"}, {"num_groups": 4, "top_groups": 2}):
        _, expert_TK = kernel.route(ops.RouteCall(logits_TE, 8, **options))
        assert expert_TK.min() >= 0 and expert_TK.max() < 60
        assert all(len(set(row)) == 8 for row in expert_TK.tolist())


@in_any_dtype
def test_rows_of_a_wider_tensor(dtype: str, device: str) -> None:
    wide = draw(5, 200, dtype, device)
    for start, num_experts in ((0, 128), (8, 60), (3, 17)):
        check(wide[::2, start : start + num_experts], 4)


def test_what_it_does_not_accept() -> None:
    logits_TE = torch.zeros(4, 16)
    assert kernel.accepts(ops.RouteCall(logits_TE, 4))
    assert not kernel.accepts(ops.RouteCall(logits_TE.double(), 4))
    assert not kernel.accepts(ops.RouteCall(torch.zeros(16, 4).T, 4))
    assert not kernel.accepts(ops.RouteCall(logits_TE, 17))
    assert not kernel.accepts(ops.RouteCall(torch.zeros(4, 1024), 4))
    assert not kernel.accepts(ops.RouteCall(logits_TE, 4, num_groups=3))
    assert not kernel.accepts(ops.RouteCall(logits_TE, 4, score="entmax"))


@pytest.mark.gpu
def test_graph_reads_scale_and_token_count_when_replayed() -> None:
    logits_TE = draw(12, 128, "bf16", "cuda")
    scale_E, num_tokens = torch.rand(128, device="cuda"), torch.tensor(12, device="cuda")
    kernel.route(ops.RouteCall(logits_TE, 8, expert_scale_E=scale_E, num_tokens=num_tokens))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weight_TK, expert_TK = kernel.route(ops.RouteCall(logits_TE, 8, expert_scale_E=scale_E, num_tokens=num_tokens))
    for tokens in (12, 7, 0):
        logits_TE.normal_()
        scale_E.uniform_()
        num_tokens.fill_(tokens)
        weight_TK.fill_(float("nan"))
        graph.replay()
        expected = ops.route.reference(ops.RouteCall(logits_TE, 8, expert_scale_E=scale_E, num_tokens=num_tokens))
        torch.testing.assert_close(weight_TK, expected[0], rtol=2e-5, atol=1e-7)
        assert torch.equal(expert_TK, expected[1])


# ---------------------------------------------------------------------------------------------------------------------
# Ahead of time
# ---------------------------------------------------------------------------------------------------------------------

COMPILED = {
    "bf16 128/8": ("bf16", 128, 8, {"expert_scale_E": True}),
    "fp32 128/8": ("fp32", 128, 8, {"num_tokens": True}),
    "fp32 60/4": ("fp32", 60, 4, {"renormalize": False}),
    "fp16 512/16": ("fp16", 512, 16, {}),
    "fp32 64/6, bias": ("fp32", 64, 6, {"select_bias_E": True}),
    "fp32 256/8, sigmoid, bias, groups": (
        "fp32",
        256,
        8,
        {"score": "sigmoid", "select_bias_E": True, "num_groups": 8, "top_groups": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("case", COMPILED)
def test_compiles_ahead_of_time(case: str, target: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    dtype, num_experts, top_k, options = COMPILED[case]
    backend, architecture, num_lanes = ahead_of_time.TARGETS[target]
    for few in (True, False):
        vector = math.gcd(16 // DTYPES[dtype].itemsize, num_experts)
        constants: dict[str, Any] = {
            "SIGMOID": options.get("score") == "sigmoid",
            "RENORMALIZE": options.get("renormalize", True),
            "TOP_GROUPS": options.get("top_groups", 1),
            "DEPENDENT": target in ("sm_90", "sm_100"),
        }
        given = few, num_experts, top_k, DTYPES[dtype].itemsize, vector, options.get("num_groups", 1), num_lanes
        constants |= kernel.choose_constants(*given)
        types = {"logits": f"*{dtype}", "weight": "*fp32", "expert": "*i32"}
        types |= {"num_rows": "i32", "stride": "i32", "scaling": "fp32"}
        for name, option, pointer in (
            ("select_bias", "select_bias_E", "*fp32"),
            ("expert_scale", "expert_scale_E", "*fp32"),
            ("num_tokens", "num_tokens", "*i64"),
        ):
            if option in options:
                types[name] = pointer
            else:
                constants[name] = None
        names = kernel.route_kernel.arg_names
        source = ASTSource(
            kernel.route_kernel,
            {name: types.get(name, "constexpr") for name in names},
            constants,
            {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")},
        )
        compiled = triton.compile(source, target=GPUTarget(backend, architecture, num_lanes), options={"num_warps": 1})
        assert compiled.metadata.shared <= 16 * 1024  # a warp has its 8 rows or so to turn round, no more
        if backend == "cuda":
            assert "ld.global.v4.b32" in compiled.asm["ptx"]
