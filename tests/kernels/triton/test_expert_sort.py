"""The expert sort against its reference: in Triton's interpreter, on a GPU, ahead of time."""

from typing import Any

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.kernels.triton import expert_sort as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.places import everywhere

few_and_many = pytest.mark.parametrize("few_pairs", [kernel.FEW_PAIRS, 0], ids=["few", "many"])


def check(expert_TK: torch.Tensor, num_experts: int) -> None:
    assert kernel.accepts(expert_TK, num_experts)
    order_N, start_E = kernel.expert_sort(expert_TK, num_experts)
    expected_order_N, expected_start_E = ops.expert_sort.reference(expert_TK, num_experts)
    torch.testing.assert_close(order_N, expected_order_N, rtol=0, atol=0)
    torch.testing.assert_close(start_E, expected_start_E, rtol=0, atol=0)


def draw(tokens: int, top_k: int, num_experts: int, device: str) -> torch.Tensor:
    """Distinct experts for each token, some of them elsewhere, some tokens padding."""
    expert_TK = torch.rand(tokens, num_experts).topk(top_k).indices.int()
    expert_TK[torch.rand(tokens, top_k) < 0.1] = -1
    expert_TK[torch.rand(tokens) < 0.1] = -1
    return expert_TK.to(device)


@everywhere
@few_and_many
@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (60, 4), (127, 3), (128, 8), (384, 8), (512, 16)])
def test_sizes(num_experts: int, top_k: int, few_pairs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_PAIRS", few_pairs)
    few_tokens = (0, 1, 20) if num_experts <= 128 else (2,)  # the interpreter takes milliseconds for each program
    for tokens in few_tokens if device == "cpu" else (0, 1, 2, 33, 222, 256, 512, 2048, 16384, 70000):
        check(draw(tokens, top_k, num_experts, device), num_experts)


@everywhere
@few_and_many
def test_skewed(few_pairs: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "FEW_PAIRS", few_pairs)
    for tokens in (40,) if device == "cpu" else (40, 300, 5000):
        for e in (-1, 0, 63):
            check(torch.full((tokens, 4), e, dtype=torch.int32, device=device), 64)
        zipf = (torch.rand(tokens, 4) ** 4 * 64).int().to(device)  # the same expert more than once in a token, too
        check(zipf, 64)


@everywhere
def test_a_longer_scan(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than the scan takes in one step."""
    monkeypatch.setattr(kernel, "FEW_PAIRS", 0)
    monkeypatch.setattr(kernel, "SCAN_STEP", 2)
    check(draw(70, 8, 16, device), 16)


def test_what_it_does_not_accept() -> None:
    assert kernel.accepts(torch.zeros(4, 2, dtype=torch.int32), 8)
    assert not kernel.accepts(torch.zeros(2, 4, dtype=torch.int32).T, 8)
    assert not kernel.accepts(torch.zeros(4, 2, dtype=torch.int32), 1024)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [16, 4096])
def test_in_a_graph(tokens: int) -> None:
    expert_TK = draw(tokens, 8, 128, "cuda")
    kernel.expert_sort(expert_TK, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        order_N, start_E = kernel.expert_sort(expert_TK, 128)
    for _ in range(3):
        expert_TK.copy_(draw(tokens, 8, 128, "cuda"))
        order_N.fill_(-7)
        graph.replay()
        expected = ops.expert_sort.reference(expert_TK, 128)
        assert torch.equal(order_N, expected[0]) and torch.equal(start_E, expected[1])


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("num_experts", [60, 128, 512])
def test_compiles_ahead_of_time(num_experts: int, target: str) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, architecture, num_lanes = ahead_of_time.TARGETS[target]
    dependent = target in ("sm_90", "sm_100")
    cases: list[tuple[Any, dict[str, Any]]] = [
        (kernel.sort_few_kernel, kernel.constants_of_few(num_pairs, num_experts)) for num_pairs in (8, 256, 2048, 4096)
    ]
    cases += zip(
        (kernel.count_kernel, kernel.scan_kernel, kernel.place_kernel), kernel.constants_of_many(131072, num_experts)
    )
    for function, constants in cases:
        constants = constants | {"DEPENDENT": dependent}
        options = {"num_warps": constants.pop("num_warps")}
        pointers = {"expert", "order", "start", "count_EB", "before_EB", "total"}
        names = function.arg_names
        source = ASTSource(
            function,
            {n: "*i32" if n in pointers else "constexpr" if n in constants else "i32" for n in names},
            constants,
            {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers},
        )
        compiled = triton.compile(source, target=GPUTarget(backend, architecture, num_lanes), options=options)
        assert compiled.metadata.shared <= 48 * 1024
