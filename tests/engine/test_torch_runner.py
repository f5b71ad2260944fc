"""A share may sample several tokens: its last rows give what as many steps of one token would."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch import platforms
from anabranch.config import EngineConfig
from anabranch.engine.engine import Engine, make_engine
from anabranch.engine.runner import Launched, Runner, load_runner
from anabranch.engine.scheduler import Sequence, Share
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.request import Request, TokenLogprobs
from anabranch.sampling_params import SamplingParams
from tools import tiny_model

PAGE = 4
PROMPT = (5, 9, 2, 14, 3)
SEEDED = {"temperature": 0.9, "seed": 3}
ASKED = [
    {"temperature": 0.0},
    SEEDED,
    {**SEEDED, "top_p": 0.9, "logprobs": 2},
    {**SEEDED, "presence_penalty": 0.9, "repetition_penalty": 1.4, "min_tokens": 3, "stop_token_ids": (1,)},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples") / "tiny"
    tiny_model.write(folder)
    return folder


@pytest.fixture(scope="module", params=["cpu", "fake"])
def runner(request: pytest.FixtureRequest, folder: Path) -> Iterator[Runner]:
    """On the CPU, and with steps of one prompt captured."""
    platform = platforms.make(request.param)
    asked = EngineConfig(model=str(folder), num_pages=64, page_size=PAGE, max_num_seqs=4, max_model_len=64, tune="off")
    config = resolve(asked, read_config(folder), platform)
    one = load_runner(config, platform)
    one.allocate(one.num_pages(), config.max_model_len)
    one.warm_up()
    yield one
    one.close()


def sequence(runner: Any, slot: int, params: dict[str, Any]) -> Sequence:
    one = Sequence(Request(id=f"{slot}", prompt_ids=PROMPT, params=SamplingParams(max_tokens=20, **params)), slot)
    one.slot = slot
    return one


def launch(runner: Runner, *shares: Share) -> Launched:
    ordered = sorted(shares, key=lambda share: share.end - share.begin > 1)
    return runner.launch(ordered, lambda id: [[10 * int(id) + page for page in range(10)]])


def logprobs(launched: Launched, row: int, params: dict[str, Any]) -> TokenLogprobs | None:
    assert launched.sampled is not None
    return launched.sampled.token_logprobs(row, 2) if "logprobs" in params else None


@pytest.mark.parametrize("params", ASKED)
@pytest.mark.parametrize("by_slot", [False, True])
def test_two_samples_are_two_steps(runner: Any, params: dict[str, Any], by_slot: bool) -> None:
    runner.sampler.by_slot = by_slot
    one, two, other = (sequence(runner, slot, params) for slot in range(3))
    found = []
    for begin, end in ((0, 5), (5, 6), (6, 7)):
        launched = launch(runner, Share(one, begin, end, 1))
        one.tokens += launched.wait()
        found.append(logprobs(launched, 0, params))
    a, b, c = one.tokens[5:]

    assert launch(runner, Share(two, 0, 5, 1), Share(other, 0, 4, 0)).wait() == [a]
    two.tokens += [a, b]  # b is a guess, and a good one
    launched = launch(runner, Share(two, 5, 7, 2), Share(other, 4, 5, 1))
    assert [share.sequence for share in launched.sampling] == [other, two, two]
    assert launched.wait() == [a, b, c]
    for row, expected in zip((1, 2), found[1:], strict=True):
        mine = logprobs(launched, row, params)
        assert (mine is None) == (expected is None)
        if mine is not None and expected is not None:
            assert mine.token_id == expected.token_id and abs(mine.logprob - expected.logprob) < 1e-4
    assert int(runner.steps.last_token_S[two.slot]) == c
    if by_slot:  # alone, where that step is captured
        again = sequence(runner, 3, params)
        assert launch(runner, Share(again, 0, 5, 1)).wait() == [a]
        again.tokens += [a, b]
        assert launch(runner, Share(again, 5, 7, 2)).wait() == [b, c]


class Read:
    """Tokens of a step that has run."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def wait(self) -> Any:
        import torch

        return torch.tensor(self.tokens)


@pytest.mark.parametrize(("tokens", "kept"), [([7, 8, 9], [7, 8]), ([7, 40, 9], [7, 40]), ([40, 7, 9], [40])])
def test_the_engine_reads_several_tokens_of_a_request(folder: Path, tokens: list[int], kept: list[int]) -> None:
    """Up to the one that ends it."""
    engine: Engine = make_engine(EngineConfig(model=str(folder), num_pages=64, page_size=PAGE, max_num_seqs=4))
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(40,))
    for id in ("two", "one"):
        engine.add(Request(id=id, prompt_ids=PROMPT, params=params))
    shares = engine.scheduler.schedule()
    two, one = shares[0]._replace(num_samples=2), shares[1]
    two.sequence.num_tokens += 1
    updates = engine._read(Launched(shares=[two, one], sampling=[two, two, one], tokens=Read(tokens)))
    assert [token for update in updates if update.id == "two" for token in update.token_ids] == kept
    assert two.sequence.output == kept and one.sequence.output == [9]
    assert [update.finish_reason for update in updates if update.id == "two"][-1] == ("stop" if 40 in kept else None)
    engine.close()


def test_the_runner_imports_no_kernels_in_c() -> None:
    """Their first import compiles them, for seconds, and a GPU has no use for them."""
    code = "import sys, anabranch.engine.torch_runner; sys.exit('anabranch.kernels.c' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
