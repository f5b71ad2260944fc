"""The engine on MLX keeps what it keeps everywhere: who else is in the batch, how a prompt is cut, what was cached, who
was preempted and who made room never changes an answer, and a seed draws the tokens it draws in torch."""

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="needs an environment of its own: make test-mlx")

from anabranch.engine.engine import Engine
from anabranch.mlx.kv_cache import Batch
from anabranch.request import Request, Update
from anabranch.sampling_params import Grammar, SamplingParams
from tests.mlx.engines import engine, greedy, run, tokens
from tests.models import tiny
from tools import tiny_model

CASES = {case.name: case for case in tiny.CASES}
NAMES = ["qwen3_moe_published", "gemma4_text_published", "mixtral_window_short_sharded"]


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(3, 36))] for _ in range(count)]


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers full; full and sliding; all sliding, with a window shorter than the prompts."""
    return tiny.save(CASES[request.param], tmp_path_factory.mktemp("mlx") / "model")


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Update]:
    """What prompts(8) give one after another, whole and cold."""
    with engine(folder, prefix_cache=False, async_scheduling=False) as one:
        return [run(one, [prompt], greedy(12))[0] for prompt in prompts(8)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": False},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 1, "prefix_cache": False},
        {"num_pages": 20, "max_model_len": 64},
    ],
    ids=["together", "synchronous", "chunks", "single tokens", "preempted"],
)
def test_together_is_alone(folder: Path, alone: list[Update], options: dict[str, Any]) -> None:
    with engine(folder, **options) as one:
        assert tokens(run(one, prompts(8), greedy(12))) == tokens(alone)
        assert one.scheduler.num_preemptions or "num_pages" not in options


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_rows_that_make_room_for_others_come_back(folder: Path, alone: list[Update], prefix_cache: bool) -> None:
    with engine(folder, prefix_cache=prefix_cache, num_pages=80) as one:
        one.runner.working.room = one.runner.working.cost([60])
        assert tokens(run(one, prompts(8), greedy(12))) == tokens(alone)
        assert one.runner.working.num_parked > 10


def test_a_warm_prefix_is_a_cold_one(folder: Path) -> None:
    """Also while the request that computed it still runs, and when it has long gone."""
    stem = prompts(1)[0] + list(range(30))
    batch = [stem[:n] + [n] for n in (31, 30, 9, 17)] + [stem]
    with engine(folder, prefix_cache=False) as cold:
        expected = [run(cold, [prompt], greedy(12))[0] for prompt in batch]
    with engine(folder, num_pages=1024) as warm:
        found = run(warm, batch, greedy(12), joins={i: 3 * i for i in range(5)})
        again = [run(warm, [prompt], greedy(12))[0] for prompt in batch]
    assert tokens(found) == tokens(again) == tokens(expected)
    assert found[1].num_cached >= 28 and found[4].num_cached >= 28
    assert all(update.num_cached >= len(prompt) - 8 for update, prompt in zip(again, batch, strict=True))


def test_a_seed_draws_what_it_draws_in_torch(folder: Path) -> None:
    """With everything a request can ask of the sampler, in one batch with others."""
    several: list[dict[str, Any]] = [
        {},
        {"top_k": 20, "min_p": 0.01},
        {"top_p": 0.9, "temperature": 1.5},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logit_bias": {7: 4.0, 9: -100.0}, "min_tokens": 5, "stop_token_ids": (3,)},
        {"allowed_token_ids": tuple(range(40))},
        {"logprobs": 3, "n": 1},
        {"temperature": 0.0, "prompt_logprobs": 2},
    ]
    params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, **more) for i, more in enumerate(several)]
    with engine(folder, "cpu") as torch_engine, engine(folder) as one:
        expected, found = run(torch_engine, prompts(8), params), run(one, prompts(8), params)
    assert tokens(found) == tokens(expected)
    assert [update.finish_reason for update in found] == [update.finish_reason for update in expected]
    for mine, other in zip(found[6].logprobs, expected[6].logprobs, strict=True):
        assert abs(mine.logprob - other.logprob) < 1e-4 and mine.rank == other.rank
    assert found[7].prompt_logprobs is not None and expected[7].prompt_logprobs is not None
    assert found[7].prompt_logprobs[0] is None and len(found[7].prompt_logprobs) == len(prompts(8)[7])
    for mine, other in zip(found[7].prompt_logprobs[1:], expected[7].prompt_logprobs[1:], strict=True):
        assert mine.token_id == other.token_id and abs(mine.logprob - other.logprob) < 1e-4
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]


def test_prompt_logprobs_however_the_prompt_is_cut(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import anabranch.mlx.runner as module

    monkeypatch.setattr(module, "ROWS_OF_LOGITS", 8)
    prompt, params = prompts(1)[0] + [5, 4, 3], greedy(3, prompt_logprobs=0)
    with engine(folder) as one, engine(folder, max_num_batched_tokens=5) as cut:
        whole, pieces = run(one, [prompt], params)[0], run(cut, [prompt], params)[0]
    assert whole.prompt_logprobs is not None and pieces.prompt_logprobs is not None
    for a, b in zip(whole.prompt_logprobs[1:], pieces.prompt_logprobs[1:], strict=True):
        assert a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-4


def test_experts_are_told_and_counted(folder: Path) -> None:
    """Which experts a token went to, as a set; and every one of them in the histogram."""
    params, batch = greedy(5, return_routed_experts=True), prompts(3)
    options = {"expert_load_interval": 1, "prefix_cache": False}
    with engine(folder, "cpu", **options) as torch_engine, engine(folder, max_num_batched_tokens=11, **options) as one:
        expected, found = run(torch_engine, batch, params), run(one, batch, params)
        load = one.stats()["expert_load"]
    for mine, other, prompt in zip(found, expected, batch, strict=True):
        assert len(mine.routed_experts) == len(prompt) + 5 - 1
        for a, b in zip(mine.routed_experts, other.routed_experts, strict=True):
            assert [sorted(layer) for layer in a] == [sorted(layer) for layer in b]
    layers, top_k = len(mine.routed_experts[0]), len(mine.routed_experts[0][0])
    # A step may have been launched for a request whose last token was not read yet.
    computed = sum(len(prompt) + 5 - 1 for prompt in batch)
    assert len(load) == layers and all(computed * top_k <= sum(row) <= (computed + 3) * top_k for row in load)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer."""
    folder = tmp_path_factory.mktemp("mlx") / "tiny"
    tiny_model.write(folder)
    return folder


@pytest.fixture
def talker(texts: Path) -> Iterator[Engine]:
    with engine(texts, max_model_len=256) as one:
        yield one


def test_what_needs_the_hosts_tokens_waits_and_nobody_else(talker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar and bad words of several tokens among free requests: the masks hold, the others' tokens stay, and their
    batch is not taken apart for those that skip every other step."""
    assert talker.tokenizer is not None
    splits: list[Batch] = []
    split = Batch.split
    monkeypatch.setattr(Batch, "split", lambda batch, rows: splits.append(batch) or split(batch, rows))
    bias = dict.fromkeys(talker.tokenizer.encode("abc"), 100.0)
    held = [
        SamplingParams(max_tokens=40, grammar=Grammar(regex="[ab]{3}-(yes|no)"), seed=1),
        SamplingParams(max_tokens=30, logit_bias=bias, bad_words=("ab", "ca"), seed=0),
        SamplingParams(max_tokens=40, grammar=Grammar(regex="(x|yz){9}"), seed=2),
    ]
    free = [greedy(25), greedy(14)]
    batch = [[1, 2], [3, 4, 5], [6], [9, 8, 7], [5] * 30]
    expected = [run(talker, [prompt], one)[0] for prompt, one in zip(batch[3:], free, strict=True)]
    found = run(talker, batch, held + free, joins={2: 3, 4: 6})
    first, words, last = (talker.tokenizer.decode(update.token_ids) for update in found[:3])
    assert first[3:] in ("-yes", "-no") and set(first[:3]) <= set("ab")
    assert set(words) == set("abc") and "ab" not in words and "ca" not in words and len(words) == 30
    assert last.replace("yz", "x") == "x" * 9
    assert tokens(found[3:]) == tokens(expected)
    assert len(splits) <= 2, "free requests and waiting ones share a batch"


def test_an_id_used_again_and_an_abort_in_flight(talker: Engine) -> None:
    expected = run(talker, [[1, 2, 3]], greedy(9))[0]
    talker.add(Request(id="x", prompt_ids=(7, 8), params=greedy(30)))
    for _ in range(3):
        talker.step()
    talker.abort("x")
    talker.add(Request(id="x", prompt_ids=(1, 2, 3), params=greedy(9)))
    found: list[int] = []
    while talker.has_work:
        for update in talker.step():
            found += update.token_ids
    assert found == expected.token_ids
    assert len(talker.runner.rows) == 1, "rows of requests that left are kept"


def test_the_command_line_and_its_threads(texts: Path) -> None:
    """`generate` streams: its steps run in threads that did not load the model."""
    texts_of = {}
    for platform in ("cpu", "mlx"):
        command = [sys.executable, "-m", "anabranch.cli.main", "generate", str(texts), "A river", "--max-tokens", "24"]
        environment = {"ANABRANCH_PLATFORM": platform, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert done.returncode == 0, done.stderr
        texts_of[platform] = done.stdout
    assert texts_of["mlx"] == texts_of["cpu"] and texts_of["cpu"].startswith("A river")
