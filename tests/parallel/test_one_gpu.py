"""Two ranks on one GPU: captured steps with collectives in them, sums through symmetric memory, a rank that ends.

NCCL refuses two ranks on one device unless it is told otherwise, from 2.30.7 on:

    LD_PRELOAD=.../libnccl.so.2 NCCL_MULTI_RANK_GPU_ENABLE=1 TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 \
        ANABRANCH_TEST_ALL=1 pytest tests/parallel/test_one_gpu.py
"""

import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from anabranch import platforms
from anabranch.llm import LLM, SamplingParams
from anabranch.parallel.group import BUFFER_VARIABLE, ONE_SHOT_BYTES, TorchGroup
from anabranch.platforms.symmetric import SymmetricMemory
from tests.models import tiny
from tests.parallel import largest
from tests.ranks.ending import fails_soon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1", reason="two ranks on one GPU: see above"),
]
PROMPTS = [[(7 * i + j * j) % tiny.VOCAB_SIZE for j in range(length)] for i, length in enumerate((5, 33, 1, 18, 47, 9))]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 8, "num_pages": 64, "max_model_len": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (case,) = (case for case in tiny.CASES if case.name == "qwen3_moe_published")
    return tiny.save(case, tmp_path_factory.mktemp("ranks") / "model")


@pytest.mark.parametrize("graphs", ["none", "decode", "full", "pieces", "traced", "compiled"])
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("buffer", ["", "0"])
def test_two_ranks_answer_as_one(
    folder: Path, graphs: str, expert_parallel: bool, buffer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(BUFFER_VARIABLE, buffer)
    params, found = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for size in (1, 2):
        options = {"tensor_parallel_size": size, "expert_parallel": expert_parallel, "graphs": graphs, **OPTIONS}
        with LLM(str(folder), **options) as llm:
            found.append([[output.token_ids for output in llm.generate(PROMPTS, params)] for _ in range(2)])
            if size == 2:
                assert isinstance(llm.engine.runner.model.group.one_shot, SymmetricMemory) == (buffer == "")  # type: ignore[attr-defined]
    assert found[0] == found[1]


@pytest.mark.parametrize("graphs", ["full", "pieces"])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_the_largest_captured_steps(tmp_path: Path, graphs: str, expert_parallel: bool) -> None:
    """With sums that are too large for the buffer."""
    largest.compare(largest.save(tmp_path / "model"), graphs, expert_parallel, os.environ)


@pytest.mark.parametrize("graphs", ["decode", "full", "pieces"])
def test_a_buffer_that_is_too_small_is_refused(folder: Path, graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUFFER_VARIABLE, "1000")
    with pytest.raises(ValueError, match=f"{BUFFER_VARIABLE}=1000: .* must have at least [0-9,]+ bytes"):
        LLM(str(folder), tensor_parallel_size=2, graphs=graphs, **OPTIONS)


def _join(rank: int, folder: str) -> tuple[TorchGroup, SymmetricMemory]:
    timeout = timedelta(seconds=60)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timeout)
    assert dist.group.WORLD is not None
    group = TorchGroup(dist.group.WORLD)
    group.reserve(platforms.current(), 1 << 30)
    assert isinstance(group.one_shot, SymmetricMemory) and group.one_shot.buffer.nbytes == ONE_SHOT_BYTES
    return group, group.one_shot


def _sums(rank: int, folder: str) -> None:
    platform = platforms.current()
    group, one_shot = _join(rank, folder)
    for dtype in (torch.float32, torch.bfloat16):
        for count in (8, 2048, ONE_SHOT_BYTES // dtype.itemsize, ONE_SHOT_BYTES // dtype.itemsize + 8):
            own = [torch.arange(count, device=platform.device).remainder(97 + r).to(dtype) for r in range(2)]
            assert one_shot.takes(own[rank]) == (own[rank].nbytes <= ONE_SHOT_BYTES)
            assert torch.equal(group.all_reduce(own[rank].clone()), own[0] + own[1])
    # Captured, and replayed with other numbers: the same buffer each time.
    x = torch.zeros(4096, device=platform.device)
    graph = torch.cuda.CUDAGraph()
    group.all_reduce(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        once = group.all_reduce(x)
        twice = group.all_reduce(once)
    for number in range(1, 20):
        x.fill_(number + rank)
        graph.replay()
        assert torch.equal(once, torch.full_like(x, 2 * number + 1))
        assert torch.equal(twice, torch.full_like(x, 2 * (2 * number + 1)))
    dist.barrier()
    dist.destroy_process_group()


def test_sums_through_symmetric_memory() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_sums, (folder,), nprocs=2)


def _alone(rank: int, folder: str) -> None:
    group, one_shot = _join(rank, folder)
    x = torch.zeros(ONE_SHOT_BYTES // 4, device="cuda")
    group.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            group.all_reduce(x)
    torch.cuda.synchronize()
    if rank == 0:  # the other ends, and has not replayed
        graph.replay()
        group.all_reduce(x)
        began, num_rounds = time.monotonic(), 1
        while not one_shot.release():
            num_rounds += 1
            assert time.monotonic() - began < 10
        torch.cuda.synchronize()
        print(f"{num_rounds} rounds in {time.monotonic() - began:.3f} s")
    os._exit(0)


def test_sums_without_the_other_rank_are_released() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_alone, (folder,), nprocs=2)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("generating", [True, False])
@pytest.mark.parametrize("graphs", ["none", "full"])
def test_a_rank_that_ends(folder: Path, sent: signal.Signals, generating: bool, graphs: str) -> None:
    with LLM(str(folder), tensor_parallel_size=2, graphs=graphs, **OPTIONS) as llm:
        fails_soon(llm, sent, 1, generating)
