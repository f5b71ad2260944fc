"""Drafts change no answer: with speculation on, every request gets the tokens it gets alone with speculation off,
greedy or drawn, whoever else runs, however prompts are cut, whatever is cached, preempted or aborted.

Tiny random models do not repeat themselves, so most tests guess from the answers, with errors; n-grams draft for the
bundled model.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import bundled, platforms
from anabranch.config import EngineConfig
from anabranch.engine import engine as engine_module
from anabranch.engine.engine import Engine, make_engine
from anabranch.engine.single import SingleSequence
from anabranch.layers.config import GatedDeltaConfig
from anabranch.llm import LLM
from anabranch.loader.load import load_model
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.request import Request, Update
from anabranch.sampling_params import Grammar, SamplingParams
from tests.models import tiny
from tools import tiny_model

CASES = {case.model_type: case for case in reversed(tiny.CASES)}
CASES |= {case.name: case for case in tiny.CASES if "sliding" in case.name}
USUAL = {"qwen3_moe", "llama"}  # test_graphs has drafts with states
FOLDERS = [pytest.param(name, marks=[] if name in USUAL else [pytest.mark.slow], id=name) for name in CASES]
DEFAULTS = {"dtype": "float32", "num_pages": 256, "page_size": 4, "max_num_seqs": 16, "max_model_len": 128}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    SamplingParams(temperature=1.1, seed=1, max_tokens=22, ignore_eos=True),
    SamplingParams(
        temperature=0.8, seed=2, top_k=20, top_p=0.9, min_p=0.01, max_tokens=17, ignore_eos=True, logprobs=0
    ),
    SamplingParams(temperature=0.9, seed=3, max_tokens=18, min_tokens=9, stop_token_ids=tuple(range(60))),
    SamplingParams(
        temperature=0, max_tokens=19, logit_bias={3: 1.5}, allowed_token_ids=tuple(range(90)), min_tokens=19
    ),
    SamplingParams(
        temperature=1, seed=4, max_tokens=13, prompt_logprobs=1, return_routed_experts=True, ignore_eos=True
    ),
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.2, frequency_penalty=0.3, max_tokens=15),
]
Batch = list[Request]


class Guesses:
    """Drafts from answers that are known, with errors and shorter than asked for at times."""

    def __init__(self, known: list[list[int]]) -> None:
        self.known, self.random = known, random.Random(0)

    def __call__(self) -> "Guesses":
        return self

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        rng = self.random
        answers = [one[len(tokens) :] for one in self.known if one[: len(tokens)] == tokens]
        found = list(rng.choice(answers)[:most]) if answers and rng.random() < 0.9 else []
        found += [rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(most - len(found) + 1))]
        return [token if rng.random() < 0.8 else rng.randrange(tiny.VOCAB_SIZE) for token in found]


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(CASES[request.param], tmp_path_factory.mktemp("model") / "model")


Engines = Callable[..., Engine]


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    """Engines with speculation; `known` are answers to guess from."""
    made: list[Engine] = []

    def make(known: list[list[int]], **options: Any) -> Engine:
        monkeypatch.setattr(engine_module, "NgramDrafter", Guesses(known))
        options = DEFAULTS | {"speculative": "ngram"} | options
        made.append(make_engine(EngineConfig(model=str(folder), **options)))
        return made[-1]

    yield make
    for one in made:
        assert 0 < one.metrics.accepted_tokens < one.metrics.draft_tokens
        one.close()
        one.scheduler.check()
        assert one.kv.usage() == 0


def requests(count: int) -> Batch:
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(3, 45))) for _ in range(count)]
    return [Request(id=str(i), prompt_ids=p, params=PARAMS[i % len(PARAMS)]) for i, p in enumerate(prompts)]


def run(engine: Engine, batch: Batch, aborted: Sequence[str] = ()) -> list[Update]:
    """All at once; each request's updates merged into one."""
    total = {request.id: Update(id=request.id) for request in batch}
    for request in batch:
        engine.add(request)
    left, rng = list(aborted), random.Random(1)
    while engine.has_work:
        for update in engine.step():
            mine = total[update.id]
            assert mine.finish_reason is None, "nothing comes after the end"
            mine.token_ids += update.token_ids
            mine.logprobs += update.logprobs
            mine.num_cached = update.num_cached
            mine.finish_reason, mine.stop_token = update.finish_reason, update.stop_token
            mine.prompt_logprobs = update.prompt_logprobs or mine.prompt_logprobs
            mine.routed_experts = update.routed_experts or mine.routed_experts
        if left and rng.random() < 0.3:
            engine.abort(left.pop())
        engine.scheduler.check()
        engine.runner.sampler.check()
    return list(total.values())


def assert_same(found: list[Update], expected: list[Update]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids, mine.id
        assert (mine.finish_reason, mine.stop_token) == (other.finish_reason, other.stop_token)
        assert mine.routed_experts == other.routed_experts
        for mine_all, other_all in ((mine.logprobs, other.logprobs), (mine.prompt_logprobs, other.prompt_logprobs)):
            for a, b in zip(mine_all or [], other_all or [], strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    assert abs(a.logprob - b.logprob) < 1e-4 and (a.token_id, a.rank) == (b.token_id, b.rank)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Callable[[Batch], list[Update]]]:
    """Each request by itself, cold, without speculation."""
    one = make_engine(EngineConfig(model=str(folder), prefix_cache=False, **DEFAULTS))
    known: dict[Request, Update] = {}

    def compute(batch: Batch) -> list[Update]:
        for request in batch:
            if request.id not in known:
                known[request.id] = run(one, [request])[0]
        return [known[request.id] for request in batch]

    yield compute
    assert one.metrics.drafts == 0
    one.close()


def answers(batch: Batch, updates: list[Update]) -> list[list[int]]:
    return [[*request.prompt_ids, *update.token_ids] for request, update in zip(batch, updates, strict=True)]


def test_batched_with_drafts_is_alone_without(engine, alone) -> None:
    batch = requests(16)
    expected = alone(batch)
    one = engine(answers(batch, expected))
    assert_same(run(one, batch), expected)
    assert one.metrics.steps < sum(len(update.token_ids) for update in expected) / 6
    assert one.stats()["generation_tokens"] == sum(len(update.token_ids) for update in expected)


def test_any_chunking_is_the_whole_prompt(engine, alone) -> None:
    for budget, count in ((2, 2), (7, 4), (16, 8)):
        batch = requests(count)
        expected = alone(batch)
        assert_same(run(engine(answers(batch, expected), max_num_batched_tokens=budget), batch), expected)


def test_warm_prefix_is_cold(engine, alone) -> None:
    """Also where the next turn of a conversation continues an answer that was drafted, and without drafts."""
    batch = requests(5)
    expected = alone(batch)
    one = engine(answers(batch, expected), max_num_seqs=1, num_pages=1024)  # one after another
    one.kv.answer_interval = 4
    states = one.kv.shares_states
    for _ in range(2):
        assert_same(run(one, batch), expected)
    longer = [
        Request(id=f"longer {i}", prompt_ids=(*tokens, i), params=PARAMS[i])
        for i, tokens in enumerate(answers(batch, expected))
    ]
    expected = alone(longer)
    warm = run(one, longer)
    assert_same(warm, expected)
    missing = [len(request.prompt_ids) - update.num_cached for update, request in zip(warm, longer, strict=True)]
    # Steps that accept drafts pass over some ends of pages, where states could be copied.
    assert max(missing) <= (16 if states else 8) and min(missing) <= 8
    one.set_drafting(False)
    assert_same(run(one, longer), expected)


def test_preempted_is_undisturbed(engine, alone) -> None:
    batch = requests(24)
    expected = alone(batch)
    one = engine(answers(batch, expected), num_pages=32, max_model_len=72)
    assert_same(run(one, batch), expected)
    assert one.scheduler.num_preemptions > 0


def test_abort_leaves_others_unchanged(engine, alone) -> None:
    batch = requests(9)
    expected = alone(batch)
    gone = ("1", "4", "6")
    found = run(engine(answers(batch, expected)), batch, gone)
    for mine, other in zip(found, expected, strict=True):
        if mine.id in gone:
            assert mine.token_ids == other.token_ids[: len(mine.token_ids)]
        else:
            assert_same([mine], [other])
    assert any(len(found[int(id)].token_ids) < len(expected[int(id)].token_ids) for id in gone)


def test_the_end_of_an_answer_within_a_run(engine, alone) -> None:
    """max_tokens, a stop token and the model's limit end it there, at every place of a run of accepted drafts."""
    prompt, params = requests(1)[0].prompt_ids, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    whole = Request(id="whole", prompt_ids=prompt, params=params)
    tokens = alone([whole])[0].token_ids
    one = engine([[*prompt, *tokens]], max_model_len=len(prompt) + 30)
    batch = [
        Request(id=f"limit {i}", prompt_ids=prompt, params=dataclasses.replace(params, max_tokens=i))
        for i in range(1, 12)
    ]
    for number, update in enumerate(run(one, batch), 1):
        assert (update.token_ids, update.finish_reason) == (tokens[:number], "length")
    for stop in tokens[:12]:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
        (update,) = run(one, [Request(id="stop", prompt_ids=prompt, params=params)])
        assert update.token_ids == tokens[: tokens.index(stop) + 1]
        assert (update.finish_reason, update.stop_token) == ("stop", stop)
    (update,) = run(one, [whole])
    assert (update.token_ids, update.finish_reason) == (tokens[:30], "length")


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_tokens_are_distributed_as_without_drafts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square over three tokens of which each is one of two; the drafts are the likeliest ones."""
    folder = tiny.save(CASES[name], tmp_path)
    prompt, num_requests = (5, 17, 99, 42), 1600
    single = SingleSequence(load_model(folder, dtype="float32"), 128)
    expected, best = {}, {}

    def visit(tokens: tuple[int, ...], probability: float) -> None:
        if len(tokens) == 3:
            expected[tokens] = probability * num_requests
            return
        single.sequence.tokens.clear()
        logits = single.forward([*prompt, *tokens])[-1]
        top = torch.topk(logits, 2)
        best[tokens] = int(top.indices[0])
        for token, share in zip(top.indices.tolist(), top.values.softmax(-1).tolist(), strict=True):
            visit((*tokens, token), probability * share)

    visit((), 1.0)

    class Likeliest:
        def propose(self, tokens: Sequence[int], most: int) -> list[int]:
            found = list(tokens[len(prompt) :])
            while len(found) < 3:
                found.append(best[tuple(found)])
            return found[len(tokens) - len(prompt) :][:most]

    monkeypatch.setattr(engine_module, "NgramDrafter", Likeliest)
    params = SamplingParams(temperature=1, top_k=2, max_tokens=3, ignore_eos=True)
    batch = [Request(id=str(i), prompt_ids=prompt, params=params) for i in range(num_requests)]
    one = make_engine(EngineConfig(model=str(folder), **(DEFAULTS | {"max_num_seqs": 64, "speculative": "ngram"})))
    found = run(one, batch)
    assert 0.3 < one.stats()["spec_decode_acceptance"] < 0.9
    one.set_drafting(False)
    assert_same(run(one, batch), found)
    one.close()
    counts = Counter(tuple(update.token_ids) for update in found)
    assert set(counts) <= set(expected)
    assert sum((counts[tokens] - mean) ** 2 / mean for tokens, mean in expected.items()) < 24.3  # 0.1 %, 7 degrees


# -- the engine's surroundings -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculation") / "tiny"
    tiny_model.write(folder)
    return folder


def test_requests_that_cannot_be_sampled_on_trial_get_no_drafts(bytes_model: Path) -> None:
    """Grammars, bad words and penalties depend on each token; they get the answers that they get without."""
    pytest.importorskip("llguidance")
    special = [
        {"grammar": Grammar(regex="(abab|cdcd)+")},
        {"bad_words": ("abc",)},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.1},
    ]
    found = []
    for speculative in ("none", "ngram"):
        one = make_engine(EngineConfig(model=str(bytes_model), num_pages=64, page_size=4, speculative=speculative))
        batch = [
            Request(id=str(i), prompt_ids=(1, 2) * 5, params=SamplingParams(max_tokens=20, seed=i, **wanted))
            for i, wanted in enumerate(special)
        ]
        found.append(run(one, batch))
        assert one.metrics.drafts == 0
        biased = SamplingParams(max_tokens=20, logit_bias={5: 100.0})
        assert run(one, [Request(id="biased", prompt_ids=(1, 2), params=biased)])[0].token_ids == [5] * 20
        assert one.metrics.accepted_tokens == (13 if speculative == "ngram" else 0)  # 3, then 5 + 5 + 5 + 2
        one.close()
    assert_same(*found)


def test_ngrams_draft_for_the_bundled_model() -> None:
    """Repetitive text: most drafts are right, and there are fewer steps than tokens."""
    llm = LLM(speculative="ngram", max_num_seqs=4, show_progress=False)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    prompts = ["She said, I'm happy, I'm happy, I'm happy, I'm happy,", "one two three one two three one two three one"]
    drafted = llm.generate(prompts, params)
    steps, stats = engine.metrics.steps, engine.stats()
    assert stats["spec_decode_acceptance"] > 0.3 and stats["spec_decode_accepted_tokens"] > 20
    stopped = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, stop=(" below",)))
    engine.set_drafting(False)
    plain = llm.generate(prompts, params)
    for mine, other, cut in zip(drafted, plain, stopped, strict=True):
        assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
        assert " below" in other.text and cut.text == other.text.partition(" below")[0]
        assert cut.token_ids == other.token_ids[: len(cut.token_ids)]
    assert steps < 120
    llm.close()


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="speculative must be one of none, ngram, mtp, not 'eagle'"):
        EngineConfig(model="x", speculative="eagle")
    with pytest.raises(ValueError, match="speculative_tokens must be an integer of at least 1"):
        EngineConfig(model="x", speculative_tokens=0)
    config, platform = EngineConfig(model="x", speculative="ngram"), platforms.current()
    hybrid = read_config(tiny.save(CASES["qwen3_5_moe"], tmp_path))
    resolve(config, hybrid, platform)
    monkeypatch.setattr(GatedDeltaConfig, "verifies_drafts", False)
    with pytest.raises(ValueError, match="speculative ngram: not yet with the states of qwen3_5_moe"):
        resolve(config, hybrid, platform)
    assert not platforms.load("mlx").verifies_drafts
    monkeypatch.setattr(type(platform), "verifies_drafts", False)
    with pytest.raises(ValueError, match="speculative ngram: not yet on platform 'cpu'"):
        resolve(config, read_config(bundled.folder()), platform)


@pytest.mark.parametrize(
    ("seqs", "drafts", "rows"), [(1, 4, 5), (16, 4, 80), (200, 4, 256), (512, 4, 512), (4, 99, 256)]
)
def test_rows_that_sample(seqs: int, drafts: int, rows: int) -> None:
    config = {"model": "x", "max_num_seqs": seqs, "speculative_tokens": drafts}
    assert EngineConfig(speculative="ngram", **config).max_samples == rows
    assert EngineConfig(**config).max_samples == seqs
