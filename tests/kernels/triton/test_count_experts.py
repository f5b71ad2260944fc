"""The experts' histogram in Triton against its reference: in the interpreter, on a GPU, in a graph, ahead of time."""

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")

from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import count_experts as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import everywhere


@everywhere
def test_samples(device: str) -> None:
    for label, arguments in ops.count_experts.samples(torch.float32, torch.Generator().manual_seed(0)):
        assert kernel.accepts(**arguments)
        found = faults(ops.count_experts, kernel.count_experts, arguments, torch.float32, torch.device(device))
        assert not found, (label, found)


@everywhere
def test_ids_that_no_expert_has_touch_nothing(device: str) -> None:
    expert_LTK = torch.tensor([[[0, 4]], [[-1, 3]]], dtype=torch.int32, device=device)
    count_LE = torch.zeros(2, 4, dtype=torch.int64, device=device)
    kernel.count_experts(expert_LTK, count_LE)
    assert count_LE.tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 8192])
def test_in_a_graph(num_tokens: int) -> None:
    """As the engine captures it: 48 layers' ids, stacked; the counts are the same memory at every replay."""
    count_LE = torch.zeros(48, 128, dtype=torch.int64, device="cuda")
    seen = [torch.full((num_tokens, 8), -1, dtype=torch.int32, device="cuda") for _ in range(48)]
    kernel.count_experts(torch.stack(seen), count_LE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.count_experts(torch.stack(seen), count_LE)
    expected = torch.zeros(48, 128, dtype=torch.int64)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        for layer, static in enumerate(seen):
            expert_TK = torch.randint(-1, 128, (num_tokens, 8), generator=generator, dtype=torch.int32)
            static.copy_(expert_TK)
            expected[layer] += torch.bincount(expert_TK[expert_TK >= 0], minlength=128)
        graph.replay()
    assert torch.equal(count_LE.cpu(), expected)


@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
def test_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: target in ahead_of_time.DEPENDENT)
    _, arguments = next(ops.count_experts.samples(torch.float32, torch.Generator()))
    with recorded(kernel, "count_kernel") as launches:
        kernel.count_experts(**copy(arguments))
    (launch,) = launches
    compiled = compile_for(target, launch)
    if target.startswith("sm_"):
        assert "atom.global.gpu.relaxed.add.u64" in compiled.asm["ptx"]
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
