"""The input of a decode step in Triton against its reference: in the interpreter, on a GPU, ahead of time."""

from typing import Any

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import decode_inputs as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import everywhere

PAGE_SIZE = 16


def judge(op: Any, arguments: dict[str, Any], device: str) -> None:
    found = op.kernels["triton"]
    arguments = copy(arguments, torch.device(device))
    assert found.accepts(**arguments)
    assert faults(op, found.function, arguments, torch.float32) == []


def batch(rows: int, padding: int, slots: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """packed_3R, last_token_S, table_SM: distinct slots, some tokens known to the device alone, anything in padding."""
    packed_3R = torch.full((3, rows + padding), 7, dtype=torch.int32)
    packed_3R[0] = -1
    packed_3R[0, :rows] = torch.randperm(slots)[:rows]
    packed_3R[1, :rows] = torch.randint(-1, 5, (rows,))
    packed_3R[2, :rows] = torch.randint(1, width * PAGE_SIZE + 1, (rows,))
    return packed_3R, torch.randint(1 << 40, (slots + 1,)), torch.randint(1 << 30, (slots, width), dtype=torch.int32)


@everywhere
@pytest.mark.parametrize("name", ["decode_inputs", "decode_pages"])
def test_samples(name: str, device: str) -> None:
    for _, arguments in ops.OPS[name].samples(torch.float32, torch.Generator().manual_seed(0)):
        judge(ops.OPS[name], arguments, device)


@everywhere
@pytest.mark.parametrize(("rows", "padding", "width"), [(1, 0, 1), (5, 3, 300), (0, 2, 7), (70, 58, 2)])
def test_sizes(rows: int, padding: int, width: int, device: str) -> None:
    packed_3R, last_token_S, table_SM = batch(rows, padding, 100, width)
    judge(ops.decode_inputs, {"packed_3R": packed_3R, "last_token_S": last_token_S}, device)
    if device == "cpu" and rows > 10:
        return
    pages = {"packed_3R": packed_3R, "table_SM": table_SM, "page_size": PAGE_SIZE, "columns": width}
    judge(ops.decode_pages, pages, device)
    packed_3R[2].clamp_(max=PAGE_SIZE)  # only the first column is wanted
    judge(ops.decode_pages, pages | {"columns": 1}, device)


def test_what_it_does_not_accept() -> None:
    packed_3R, last_token_S, table_SM = batch(2, 0, 4, 3)
    assert kernel.accepts_inputs(packed_3R, last_token_S)
    assert not kernel.accepts_inputs(packed_3R.T.contiguous().T, last_token_S)
    assert not kernel.accepts_inputs(torch.zeros(3, kernel.BOUNDS[-1], dtype=torch.int32), last_token_S)
    assert kernel.accepts_pages(packed_3R, table_SM, 16, 3)
    assert not kernel.accepts_pages(packed_3R, table_SM, 16, 4)


@pytest.mark.gpu
def test_in_a_graph() -> None:
    packed_3R, last_token_S, table_SM = (x.cuda() for x in batch(100, 28, 256, 1024))

    def step() -> tuple[torch.Tensor, ...]:
        pages = kernel.decode_pages(packed_3R, table_SM, PAGE_SIZE, 1024)
        return *kernel.decode_inputs(packed_3R, last_token_S), *pages

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for rows in (128, 1, 100):
        packed_3R.copy_(batch(rows, 128 - rows, 256, 1024)[0])
        for tensor in found:
            tensor.fill_(-9)
        graph.replay()
        expected = (
            *ops.decode_inputs.reference(packed_3R, last_token_S),
            *ops.decode_pages.reference(packed_3R, table_SM, PAGE_SIZE, 1024),
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
def test_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: target in ahead_of_time.DEPENDENT)
    with recorded(kernel, "inputs_kernel", "pages_kernel") as launches:
        for rows in (1, 256):
            packed_3R, last_token_S, table_SM = batch(rows, 0, 256, 1024)
            kernel.decode_inputs(packed_3R, last_token_S)
            kernel.decode_pages(packed_3R, table_SM, PAGE_SIZE, 1024)
    assert len(launches) == 4
    for launch in launches:
        compiled = compile_for(target, launch)
        if target.startswith("sm_"):
            assert ahead_of_time.resources(compiled)["LOCAL"] == 0
