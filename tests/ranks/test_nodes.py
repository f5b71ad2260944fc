"""Ranks on two nodes, which are two processes of this machine that torchrun starts, give the answers of one process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.config import EngineConfig
from anabranch.llm import LLM, SamplingParams
from anabranch.ranks import nodes
from tests.models import tiny

PROMPTS = [[(7 * i + j * j) % tiny.VOCAB_SIZE for j in range(length)] for i, length in enumerate((5, 33, 1, 18))]
TWO = '{"tensor_parallel_size": 2}'
PROGRAM = """
import json, os, sys
from anabranch.llm import LLM, SamplingParams
if __name__ == "__main__":
    options, prompts = json.loads(sys.argv[2]), json.loads(sys.argv[3])
    with LLM(sys.argv[1], dtype="float32", nodes=2, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        answers = [output.token_ids for output in llm.generate(prompts, params)]
        print("ANSWERS", os.environ["RANK"], json.dumps(answers), flush=True)
        if len(sys.argv) > 4:
            while True:
                llm.generate(prompts, params)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (case,) = (case for case in tiny.CASES if case.name == "qwen3_moe_published")
    return tiny.save(case, tmp_path_factory.mktemp("nodes") / "model")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


Start = Callable[[list[str], int, int, bool], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[subprocess.Popen[str]] = []

    def start(*args: Any) -> subprocess.Popen[str]:
        made.append(node(*args))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.communicate()


def node(command: list[str], number: int, port: int, torchrun: bool) -> subprocess.Popen[str]:
    """A program on node `number`: by torchrun, or with its variables set by hand."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if torchrun:
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        run += ["--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        command = [*run, *command]
    else:
        environment |= {"RANK": str(number), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def start_both(
    start: Start, folder: Path, tmp_path: Path, options: dict[str, Any], torchrun: bool, *more: str
) -> list[subprocess.Popen[str]]:
    """PROGRAM on both nodes."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command, port = [str(script), str(folder), json.dumps(options), json.dumps(PROMPTS), *more], free_port()
    return [start(command, number, port, torchrun) for number in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, torchrun",
    [
        ({"tensor_parallel_size": 2}, True),
        ({"tensor_parallel_size": 2}, False),
        ({"tensor_parallel_size": 4}, True),
        ({"data_parallel_size": 4, "expert_parallel": True}, False),
        ({"data_parallel_size": 2, "tensor_parallel_size": 2, "expert_parallel": True}, False),
    ],
)
def test_two_nodes_answer_as_one_process(
    folder: Path, tmp_path: Path, start: Start, options: dict[str, Any], torchrun: bool
) -> None:
    with LLM(str(folder), dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        expected = [output.token_ids for output in llm.generate(PROMPTS, params)]
    both = start_both(start, folder, tmp_path, options, torchrun)
    found = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], found
    lines = [line for output, _ in found for line in output.splitlines() if line.startswith("ANSWERS")]
    assert lines == [f"ANSWERS 0 {json.dumps(expected)}"]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_ends_ends_the_other(folder: Path, tmp_path: Path, start: Start, killed: int) -> None:
    psutil = pytest.importorskip("psutil")
    both = start_both(start, folder, tmp_path, {"tensor_parallel_size": 2}, False, "forever")
    assert both[0].stdout is not None and both[0].stdout.readline().startswith("ANSWERS")
    began = time.monotonic()
    ranks = ranks_of(psutil, both[1].pid)
    victim = both[0].pid if killed == 0 else ranks[0]
    os.kill(victim, signal.SIGKILL)
    _, error = both[0].communicate(timeout=20)
    both[1].communicate(timeout=20)
    assert time.monotonic() - began < 10
    if killed == 1:
        assert "rank 1 of the model failed: its connection has ended" in error
    assert not any(map(psutil.pid_exists, ranks))


def answering(start: Start, folder: Path, tmp_path: Path) -> tuple[list[subprocess.Popen[str]], int]:
    """Two nodes of a rank each that answer for ever, and the process of rank 1."""
    both = start_both(start, folder, tmp_path, {"tensor_parallel_size": 2}, False, "forever")
    assert both[0].stdout is not None and both[0].stdout.readline().startswith("ANSWERS")
    (rank,) = ranks_of(pytest.importorskip("psutil"), both[1].pid)
    return both, rank


@pytest.mark.slow
def test_a_rank_of_another_node_that_is_stopped_in_a_step(folder: Path, tmp_path: Path, start: Start) -> None:
    """Its own node ends it, which ends the collective in which rank 0 waits."""
    psutil = pytest.importorskip("psutil")
    both, rank = answering(start, folder, tmp_path)
    began = time.monotonic()
    os.kill(rank, signal.SIGSTOP)
    _, error = both[0].communicate(timeout=20)
    both[1].communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert "rank 1 of the model hangs: no heartbeat for 7 s during a step" in error
    assert not psutil.pid_exists(rank)


@pytest.mark.slow
def test_a_driver_that_is_stopped_ends_other_nodes(folder: Path, tmp_path: Path, start: Start) -> None:
    psutil = pytest.importorskip("psutil")
    both, rank = answering(start, folder, tmp_path)
    time.sleep(2)  # it says that it is warm
    began = time.monotonic()
    os.kill(both[0].pid, signal.SIGSTOP)
    _, error = both[1].communicate(timeout=20)
    assert time.monotonic() - began < 10
    assert both[1].returncode == 1 and "rank 0 of the model hangs: no heartbeat for 7 s: all ranks are ended" in error
    assert not psutil.pid_exists(rank) and both[0].poll() is None


def ranks_of(psutil: object, pid: int) -> list[int]:
    children = psutil.Process(pid).children()  # type: ignore[attr-defined]
    return [process.pid for process in children if "spawn_main" in " ".join(process.cmdline())]


@pytest.mark.slow
def test_serve_on_two_nodes(start: Start) -> None:
    """The first node serves, the other follows; both end after SIGTERM to the first."""
    pytest.importorskip("uvicorn")
    import urllib.request

    ports = free_port(), free_port()
    options = ["--dtype", "float32", "--tensor-parallel-size", "2", "--nodes", "2", "--port", str(ports[1])]
    both = [start(["-m", "anabranch.cli.main", "serve", *options], number, ports[0], False) for number in (0, 1)]
    body = json.dumps({"prompt": "Once", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{ports[1]}/v1/completions", body, {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
                break
        except OSError as error:
            assert time.monotonic() < deadline, error
            time.sleep(0.3)
    both[0].send_signal(signal.SIGTERM)
    for process in both:
        process.communicate(timeout=20)
    assert [process.returncode for process in both] == [0, 0]


@pytest.mark.parametrize(
    "variables, size, words",
    [
        ({}, 2, "nodes = 2: RANK is not set; on every node run the same: torchrun --nnodes 2"),
        ({"WORLD_SIZE": "4"}, 4, "nodes = 2, and WORLD_SIZE is 4; start one process on each"),
        ({"WORLD_SIZE": "2"}, 3, "3 ranks cannot be divided among 2 nodes"),
    ],
)
def test_what_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], size: int, words: str
) -> None:
    for name in nodes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variables:
        for name, value in ({"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} | variables).items():
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        nodes.place(EngineConfig(model="x", tensor_parallel_size=size, nodes=2))
