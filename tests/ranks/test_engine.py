"""An engine whose model is divided among two ranks gives the answers of one rank, and ends with its ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.engine import engine as engine_module
from anabranch.llm import LLM, SamplingParams
from anabranch.parallel.group import BUFFER_VARIABLE
from anabranch.platforms.fake import FakePlatform
from anabranch.ranks.runner import RanksRunner
from tests.engine.test_speculation import Guesses
from tests.models import tiny
from tests.parallel import largest
from tests.parallel.ranks import fake, forked  # noqa: F401

CASES = {case.name: case for case in tiny.CASES}
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "rms_norm_eps": 0.1}
PROMPTS = [[(7 * i + j * j) % tiny.VOCAB_SIZE for j in range(length)] for i, length in enumerate((5, 33, 1, 18, 47, 9))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PENALTY = SamplingParams(temperature=0, frequency_penalty=0.5, max_tokens=12, ignore_eos=True)

pytestmark = pytest.mark.usefixtures("forked")  # those of a server: test_watch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, more in (("qwen3_moe_published", {}), ("qwen3_5_moe_published", HYBRID), ("gemma4_text_published", {})):
        case = CASES[name]
        made[name] = tiny.save(replace(case, settings=case.settings | more), tmp_path_factory.mktemp(name) / "model")
    return made


@contextmanager
def engine(folder: Path, num_ranks: int, **options: Any) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", tensor_parallel_size=num_ranks, **options) as llm:
        yield llm


def rounds(options: dict[str, Any]) -> list[list[SamplingParams]]:
    """Parameters of PROMPTS: twice, because then prefixes are cached, which are not looked for where a prompt's log
    probabilities are asked for. With three tokens to choose from answers repeat themselves, so that n-grams draft, and
    some are right."""
    params = [GREEDY, DRAWN, PENALTY] * 2
    if "speculative" in options:
        params = [replace(one, allowed_token_ids=(5, 6, 7), max_tokens=24) for one in params]
    return [params, [replace(one, prompt_logprobs=None) for one in params]]


def check_stats(options: dict[str, Any], *every: dict[str, Any]) -> None:
    """Each engine has done what the options are about; of several, one at least has found prefixes."""
    preempted, drafting = "num_pages" in options, "speculative" in options
    assert preempted or any(stats["prefix_hits"] > 0 for stats in every)
    for stats in every:
        assert preempted == (stats["preemptions"] > 0)
        assert drafting == (stats["spec_decode_drafts"] > 0)
        assert not drafting or 0 < stats["spec_decode_accepted_tokens"] < stats["spec_decode_draft_tokens"]


def answers(folder: Path, num_ranks: int, **options: Any) -> list[Any]:
    with engine(folder, num_ranks, **options) as llm:
        found = [[output.token_ids for output in llm.generate(PROMPTS, params)] for params in rounds(options)]
        llm.engine.scheduler.check()
        assert llm.engine.kv.usage() == 0
        check_stats(options, llm.stats())
        return found


SLOW = {"marks": pytest.mark.slow}
OPTIONS = [
    pytest.param({}, id="batched"),
    pytest.param({"max_num_batched_tokens": 8, "max_num_seqs": 3}, id="chunked", **SLOW),
    pytest.param({"num_pages": 5, "page_size": 16, "max_model_len": 64}, id="preempted"),
    pytest.param({"async_scheduling": False, "expert_parallel": True}, id="expert parallel", **SLOW),
    pytest.param({"moe_combine": "fused", "expert_parallel": True}, id="rows added where computed", **SLOW),
    pytest.param({"speculative": "ngram"}, id="drafts", **SLOW),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_two_ranks_answer_as_one(folders: dict[str, Path], options: dict[str, Any]) -> None:
    folder = folders["qwen3_moe_published"]
    assert answers(folder, 2, **options) == answers(folder, 1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_moe_published", "gemma4_text_published"])
def test_two_ranks_of_other_families(folders: dict[str, Path], name: str) -> None:
    assert answers(folders[name], 2) == answers(folders[name], 1)


@pytest.mark.slow
def test_drafts_with_states(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers too take those that count into their states."""
    folder = folders["qwen3_5_moe_published"]
    expected = answers(folder, 1)
    known = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, expected[0], strict=True)]
    monkeypatch.setattr(engine_module, "NgramDrafter", Guesses(known))
    with engine(folder, 2, speculative="ngram") as llm:
        found = [[output.token_ids for output in llm.generate(PROMPTS, params)] for params in rounds({})]
        check_stats({"speculative": "ngram"}, llm.stats())
    assert found == expected


def test_log_probabilities_and_embeddings(folders: dict[str, Path]) -> None:
    found, vectors = [], []
    for num_ranks in (1, 2):
        with engine(folders["qwen3_moe_published"], num_ranks) as llm:
            (output,) = llm.generate([PROMPTS[1]], DRAWN)
            found.append(output)
            vectors.append([*llm.embed(PROMPTS), *llm.embed(PROMPTS, pooling="mean")])
    one, two = found
    assert (torch.tensor(vectors[0]) - torch.tensor(vectors[1])).abs().max() < 1e-5
    assert one.token_ids == two.token_ids
    for ours, theirs in zip(one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True):
        assert abs(ours.logprob - theirs.logprob) < 1e-4


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_rank_that_ends_is_named(folders: dict[str, Path]) -> None:
    with engine(folders["qwen3_moe_published"], 2) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, RanksRunner)
        (follower,) = runner.followers
        pid = follower.process.pid
        assert pid is not None
        llm.generate(PROMPTS[:1], GREEDY)
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 of the model was ended by SIGKILL (before|during) a step"):
            llm.generate(PROMPTS[:1], GREEDY)
        assert time.monotonic() - began < 10
    assert gone(pid)


DRIVER = """
import json, sys
from anabranch.llm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", **json.loads(sys.argv[2]))
    print(json.dumps([follower.process.pid for follower in llm.engine.runner.followers]), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tensor"),
        pytest.param({"data_parallel_size": 2, "expert_parallel": True}, id="data", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_their_driver(folders: dict[str, Path], tmp_path: Path, options: dict[str, Any]) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    command = [sys.executable, str(script), str(folders["qwen3_moe_published"]), json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        assert len(pids) == 1 and not gone(pids[0])
        driver.kill()
    deadline = time.monotonic() + 10
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_cannot_be_divided_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="cannot be divided among 3 ranks"):
        LLM(str(folders["qwen3_moe_published"]), tensor_parallel_size=3)
    with pytest.raises(ValueError, match="tensor_parallel_size must be an integer of at least 1"):
        LLM(str(folders["qwen3_moe_published"]), tensor_parallel_size=0)


THREE = [GREEDY, replace(GREEDY, temperature=1.0, seed=3), replace(PENALTY, prompt_logprobs=1)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("graphs", ["full", "pieces", "traced", "compiled"])
def test_captured_steps_contain_collectives(
    folders: dict[str, Path],
    fake: FakePlatform,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    graphs: str,
) -> None:
    """Also those that are traced, and compiled; with sums through the buffer and without."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    every = []
    for num_ranks, environment in ((1, {}), (2, {}), (2, {BUFFER_VARIABLE: "0"})):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with engine(folders["qwen3_moe_published"], num_ranks, max_num_seqs=8, graphs=graphs) as llm:
            found = [[output.token_ids for output in llm.generate(PROMPTS, THREE)] for _ in range(2)]
            runner: Any = llm.engine.runner
            one_shot = getattr(runner.model.group, "one_shot", None)
            calls = (one_shot.num_calls, one_shot.buffer.nbytes) if one_shot else None
            made = [len(one.made) for one in (runner.forward.decodes, runner.forward.prefills) if one is not None]
            assert runner.platform is fake
            every.append((found, made, calls))
    one, with_buffer, without = every
    assert one[:2] == with_buffer[:2] == without[:2] and all(one[1])
    assert one[2] is None and without[2] is None
    assert with_buffer[2] is not None
    num_calls, num_bytes = with_buffer[2]
    assert num_calls > 0 and num_bytes % (32 * 4) == 0  # rows of its hidden size


@pytest.mark.slow
@pytest.mark.parametrize(("graphs", "expert_parallel"), [("full", True), ("pieces", False)])
def test_the_largest_captured_steps(tmp_path: Path, graphs: str, expert_parallel: bool) -> None:
    """With sums that are too large for the buffer. On a GPU: tests/parallel/test_one_gpu.py."""
    folder = largest.save(tmp_path / "model")
    largest.compare(folder, graphs, expert_parallel, os.environ | {"ANABRANCH_PLATFORM": "fake"})


def test_a_buffer_that_is_too_small_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BUFFER_VARIABLE, "1000")
    with pytest.raises(ValueError, match=f"{BUFFER_VARIABLE}=1000: .* must have at least [0-9,]+ bytes"):
        LLM(str(folders["qwen3_moe_published"]), dtype="float32", tensor_parallel_size=2)


HELD = """
import gc, socket, sys
import torch.distributed as dist
from anabranch.llm import LLM
if __name__ == "__main__":
    with LLM(sys.argv[1], dtype="float32", tensor_parallel_size=2) as llm:
        held = dist.group.WORLD
    sockets = [socket.socket() for _ in range(20)]  # they get the numbers of descriptors that were closed
    del llm
    gc.collect()
    del held
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file has a name")
def test_a_group_may_outlive_its_engine(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its destructor opens the ranks' file once more."""
    script = tmp_path / "held.py"
    script.write_text(HELD)
    command = [sys.executable, str(script), str(folders["qwen3_moe_published"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
