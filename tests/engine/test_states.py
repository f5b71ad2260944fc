"""Models with states in the prefix cache: what starts from a checkpoint answers as if computed whole, to the bit.

Matrix products may round differently for another number of rows, so steps of both sides have the same rows: one token
at a time, or chunks that end at the same places.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import platforms
from anabranch.config import EngineConfig
from anabranch.engine.engine import Engine, make_engine
from anabranch.layers.config import GatedDeltaConfig
from anabranch.platforms.fake import FakePlatform
from anabranch.request import Request, Update
from anabranch.sampling_params import SamplingParams
from tests.models import tiny

CASES = {case.name: case for case in tiny.CASES if case.model_type.startswith(("qwen3_5", "qwen3_next"))}
SLOW = set(CASES) - {"qwen3_5_moe_published"}  # to the engine they are alike
FOLDERS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [], id=name) for name in CASES]
DEFAULTS = {"dtype": "float32", "num_pages": 256, "page_size": 4, "max_num_seqs": 8, "max_model_len": 128}
DEFAULTS |= {"moe_combine": "ordered"}  # the same bits every time
PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(CASES[request.param], tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(**options: Any) -> Engine:
        made.append(make_engine(EngineConfig(model=str(folder), **(DEFAULTS | options))))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.scheduler.check()
        assert one.kv.usage() == 0
        for pool, cached in zip(one.kv.pools, one.kv.tree.num_cached, strict=True):
            assert pool.num_free + cached == pool.num_pages, "a page has leaked"


def answer(updates: list[Update]) -> list[tuple[int, float]]:
    """Tokens and their log probabilities."""
    return [(token.token_id, token.logprob) for update in updates for token in update.logprobs]


def run(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams = PARAMS) -> list[list[Update]]:
    """All at once."""
    found: dict[str, list[Update]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params))
    while engine.has_work:
        for update in engine.step():
            found[update.id].append(update)
    return list(found.values())


def one_by_one(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams = PARAMS) -> list[list[Update]]:
    return [run(engine, [prompt], params)[0] for prompt in prompts]


def draw(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(tiny.VOCAB_SIZE) for _ in range(length))


def family(rng: random.Random, count: int) -> list[tuple[int, ...]]:
    """Prompts of which many begin alike."""
    stems = [draw(rng, 24) for _ in range(3)]
    return [rng.choice(stems)[: rng.randrange(25)] + draw(rng, rng.randrange(1, 9)) for _ in range(count)]


def test_short_prompts_are_found(engine) -> None:
    """20 tokens with pages of 16: the second time, and with another end, 16 are there."""
    rng = random.Random(0)
    prompt = draw(rng, 20)
    one = engine(page_size=16, num_pages=64)
    cold, warm = one_by_one(one, [prompt, prompt])
    assert answer(warm) == answer(cold)
    assert [updates[-1].num_cached for updates in (cold, warm)] == [0, 16]
    assert (one.stats()["prefix_queries"], one.stats()["prefix_hits"]) == (40, 16)
    other = prompt[:17] + draw(rng, 20)
    (found,) = run(one, [other])
    assert found[-1].num_cached == 16
    # Chunks of a cold engine that end where those of the warm one begin.
    (cold,) = run(engine(page_size=16, num_pages=64, max_num_batched_tokens=16, prefix_cache=False), [other])
    (found,) = run(engine(page_size=16, num_pages=64, max_num_batched_tokens=16), [other])
    assert answer(found) == answer(cold)


def test_chunks_of_long_prompts(engine) -> None:
    """With chunks of pages, a warm prompt's are the last of the cold one's."""
    rng = random.Random(1)
    stem = draw(rng, 100)
    prompts = [stem, stem[:70] + draw(rng, 20), stem[:50] + draw(rng, 3), stem[:67] + draw(rng, 9), stem]
    options = {"page_size": 16, "max_num_batched_tokens": 16, "max_num_seqs": 1, "num_pages": 128}
    cold = one_by_one(engine(prefix_cache=False, **options), prompts)
    warm = engine(state_interval=32, **options)
    for turn in range(2):
        found = one_by_one(warm, prompts)
        assert list(map(answer, found)) == list(map(answer, cold))
        cached = [updates[-1].num_cached for updates in found]
        # First: where checkpoints are, every 32 tokens and at the end of 100; then where prompts parted or ended.
        assert cached == ([0, 64, 32, 64, 96] if turn == 0 else [96, 80, 48, 64, 96])


@pytest.mark.parametrize("num_pages", [pytest.param(512, marks=pytest.mark.slow), 70, 11])
def test_warm_is_cold_to_the_bit(engine, num_pages: int) -> None:
    """A token a step, requests that come and go, the same prompts again and again. With 70 pages there are 4 states,
    with 11 pages keys and values of earlier prompts are evicted too."""
    rng = random.Random(num_pages)
    prompts = family(rng, 7)
    cold = engine(max_num_batched_tokens=1, prefix_cache=False, async_scheduling=False)
    expected = list(map(answer, one_by_one(cold, prompts)))
    one = engine(
        max_num_batched_tokens=1, max_num_seqs=3, num_pages=num_pages, max_model_len=128 if num_pages > 64 else 40
    )
    found: dict[str, list[Update]] = {}
    which: dict[str, int] = {}
    while len(which) < 25 or one.has_work:
        if len(which) < 25 and len(one.sequences) < 4:
            id = str(len(which))
            which[id], found[id] = rng.randrange(len(prompts)), []
            priority = rng.choice((0, 0, 1, -1))
            one.add(Request(id=id, prompt_ids=prompts[which[id]], params=PARAMS, priority=priority))
        for update in one.step():
            found[update.id].append(update)
        if rng.random() < 0.02 and one.sequences:
            one.abort(rng.choice(sorted(one.sequences)))
        if rng.random() < 0.05 and one.scheduler.running:
            one.scheduler._preempt(rng.choice(list(one.scheduler.running)))
        one.scheduler.check()
    ended = {id for id, updates in found.items() if updates and updates[-1].finish_reason == "length"}
    assert 10 < len(ended) < 25
    for id in ended:
        assert answer(found[id]) == expected[which[id]], id
    assert one.stats()["prefix_hits"] > 40
    assert one.scheduler.num_preemptions > 2


def test_the_next_turn_starts_from_the_answer(engine) -> None:
    """A conversation: prompt, answer, and the next prompt after them."""
    rng = random.Random(2)
    prompt = draw(rng, 9)
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1, ignore_eos=True)
    one = engine(max_num_batched_tokens=1)
    one.kv.answer_interval = 16
    (first,) = run(one, [prompt], params)
    following = (*prompt, *(token for token, _ in answer(first)), *draw(rng, 5))
    (second,) = run(one, [following])
    assert second[-1].num_cached == 40  # 8 + 2 · 16 of the 49 that are known
    (cold,) = run(engine(max_num_batched_tokens=1, prefix_cache=False), [following])
    assert answer(second) == answer(cold)


def test_answers_to_one_prompt_share_its_state(engine) -> None:
    """As for n > 1: one of them computes the prompt."""
    prompt = draw(random.Random(3), 30)
    one = engine()
    found = run(one, [prompt] * 4, PARAMS)
    assert sorted(updates[-1].num_cached for updates in found) == [0, 28, 28, 28]
    (alone,) = run(engine(prefix_cache=False), [prompt])
    for updates in found:
        assert [token for token, _ in answer(updates)] == [token for token, _ in answer(alone)]


@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"speculative": "ngram"}, {"graphs": "full"}], ids=str
)
def test_a_new_prompt_takes_one_step(engine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """As many as without the prefix cache; and what begins like it is found where steps that end there have left it."""
    rng = random.Random(5)
    stem = draw(rng, 50)
    prompts = [stem, stem, stem[:37] + draw(rng, 20), stem[:37] + draw(rng, 9), stem[:37] + draw(rng, 20), draw(rng, 3)]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, ignore_eos=True)

    def numbers(**more: Any) -> list[tuple[int, int]]:
        """Steps of each prompt, and its tokens that were found. The answers are the same."""
        one, found = engine(**(options | more)), []
        for prompt in prompts:
            before = one.stats()["steps"]
            (updates,) = run(one, [prompt], params)
            found.append((one.stats()["steps"] - before, updates[-1].num_cached))
            answers.setdefault(prompt, set()).add(answer(updates)[0][0])
        return found

    if options == {"graphs": "full"}:
        monkeypatch.setattr(platforms, "current", FakePlatform)
    answers: dict[tuple[int, ...], set[int]] = {}
    assert numbers(prefix_cache=False) == [(1, 0)] * len(prompts)
    # The third leaves the first after 36 tokens and ends after 56: a step keeps one of the two states on its way.
    cached = [0, 48, 0, 36, 36, 0]
    assert numbers() == list(zip([1, 1, 2, 1, 1, 1], cached, strict=True))
    monkeypatch.setattr(GatedDeltaConfig, "keeps_cuts", False)
    assert numbers() == list(zip([2, 1, 3, 2, 2, 1], cached, strict=True))
    assert all(len(tokens) == 1 for tokens in answers.values())


def test_graphs_leave_checkpoints_as_they_are(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured while the engine is idle and the pool full of checkpoints; what replays them starts there."""
    rng = random.Random(4)
    prompts = [draw(rng, length) for length in (9, 30, 17, 44)]
    expected = one_by_one(engine(prefix_cache=False), prompts)
    monkeypatch.setattr(platforms, "current", FakePlatform)
    one = engine(graphs="full", num_pages=128)
    ((group, states),) = one.runner.states.by_group.items()
    for turn in range(3):
        found = one_by_one(one, prompts)
        for updates, others in zip(found, expected, strict=True):
            assert [token for token, _ in answer(updates)] == [token for token, _ in answer(others)]
        assert all(updates[-1].num_cached for updates in found) == (turn > 0)
        kept = [state_LP.clone() for state_LP in states]
        for _ in range(20):
            one.idle(waiting=True)
        for before, after in zip(kept, states, strict=True):
            assert torch.equal(before, after)
    assert one.kv.tree.num_cached[group] == 4


@pytest.mark.parametrize("state_dtype", ["float32", "model"])
def test_what_states_are_kept_in(engine, state_dtype: str) -> None:
    """Also where every step rounds the state, an answer from a checkpoint is the one that is computed whole."""
    rng = random.Random(2)
    prompts = [draw(rng, 40)] * 2
    options = {"dtype": "bfloat16", "state_dtype": state_dtype, "page_size": 16, "max_num_batched_tokens": 16}
    one = engine(**options)
    assert {cache[-1].dtype for cache in one.runner.kv} == {
        torch.bfloat16,
        torch.float32 if state_dtype == "float32" else torch.bfloat16,
    }
    cold, warm = one_by_one(one, prompts)
    assert warm[-1].num_cached == 32 and answer(warm) == answer(cold)
