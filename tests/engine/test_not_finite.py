"""An expert whose weights are NaN or infinite: the requests that visit it end with an error, all others are as if it
were whole. On the fake platform and the GPU, captured and not."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch import platforms
from anabranch.config import EngineConfig
from anabranch.engine import engine as engine_module
from anabranch.engine.engine import Engine, make_engine
from anabranch.llm import LLM
from anabranch.moe.layer import RoutedExperts
from anabranch.platforms.fake import FakePlatform
from anabranch.request import Request, Update
from anabranch.sampling_params import SamplingParams
from tests.models import tiny

SETTINGS = tiny.QWEN3_MOE | {"num_experts": 64, "num_hidden_layers": 2}
CASE = tiny.Case(name="qwen3_moe", model_type="qwen3_moe", settings=SETTINGS, seed=5)
OPTIONS: dict[str, Any] = {"num_pages": 128, "page_size": 16, "max_num_seqs": 8, "max_model_len": 64, "tune": "off"}
OPTIONS |= {"dtype": "float32"}  # batches of different sizes must choose the same experts
MODES: list[dict[str, Any]] = [
    {"graphs": "none"},
    {"graphs": "none", "async_scheduling": False},
    {"graphs": "pieces"},
    {"graphs": "full"},
]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, return_routed_experts=True)
KINDS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "seed": 1},
    "cut": {"temperature": 0.8, "seed": 1, "top_k": 5, "top_p": 0.9},
    "everything": {
        "temperature": 0.8,
        "seed": 1,
        "top_p": 0.9,
        "logprobs": 2,
        "frequency_penalty": 0.1,
        "allowed_token_ids": tuple(range(tiny.VOCAB_SIZE)),
    },
}
PROMPTS = {"bad": (5, 17, 40), "good": (90, 3, 77, 12)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(CASE, tmp_path_factory.mktemp("not_finite"))


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    made = FakePlatform() if request.param == "fake" else platforms.make(request.param)
    monkeypatch.setattr(platforms, "current", lambda: made)
    yield request.param


def make(folder: Path, **options: Any) -> Engine:
    return make_engine(EngineConfig(model=str(folder), **(OPTIONS | options)))


def serve(engine: Engine, params: dict[str, SamplingParams], **prompts: tuple[int, ...]) -> dict[str, list[Update]]:
    prompts = prompts or PROMPTS
    for id, prompt in prompts.items():
        engine.add(Request(id=id, prompt_ids=prompt, params=params[id]))
    updates: dict[str, list[Update]] = {id: [] for id in prompts}
    while engine.has_work:
        for update in engine.step():
            updates[update.id].append(update)
        engine.scheduler.check()
        engine.runner.sampler.check()
    assert engine.kv.usage() == 0
    return updates


def tokens(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def spoil(engine: Engine, layer: int, expert: int, value: float) -> None:
    layers = [module for module in engine.runner.model.modules() if isinstance(module, RoutedExperts)]
    layers[layer].experts.down_EDI.data[expert] = value


def visited_by_one(found: dict[str, list[Update]], first: int, end: int) -> tuple[int, int]:
    """(layer, expert) that `bad` visits at tokens [first, end) and not before, and `good` never does."""
    bad, good = (found[id][-1].routed_experts for id in ("bad", "good"))
    assert bad is not None and good is not None
    for layer in range(2):
        elsewhere = {e for token in good + bad[:first] for e in token[layer]}
        for token in bad[first:end]:
            for expert in token[layer]:
                if expert not in elsewhere:
                    return layer, expert
    raise AssertionError("both visit the same experts: choose other prompts")


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_expert_that_is_not_finite_ends_its_requests_alone(
    kind: str, value: float, folder: Path, platform: str, caplog: pytest.LogCaptureFixture
) -> None:
    """In the prompt and while decoding; with greedy neighbours, whose answer is unchanged."""
    params = {"bad": SamplingParams(max_tokens=8, ignore_eos=True, return_routed_experts=True, **KINDS[kind])}
    params["good"] = GREEDY
    clean = make(folder, graphs="none")
    expected = serve(clean, params)
    clean.close()
    for mode in MODES[:: 1 if kind == "greedy" else 3]:
        for first, end in ((0, len(PROMPTS["bad"])), (len(PROMPTS["bad"]) + 1, 10)):
            engine = make(folder, **mode)
            spoil(engine, *visited_by_one(expected, first, end), value)
            caplog.clear()
            found = serve(engine, params)
            assert tokens(found["good"]) == tokens(expected["good"]), mode
            assert found["good"][-1].finish_reason == "length"
            last = found["bad"][-1]
            assert last.finish_reason == "error" and not last.token_ids and not last.logprobs
            assert str(last.error).startswith("internal error: the model's logits are NaN or infinite")
            number = len(tokens(found["bad"]))
            assert tokens(found["bad"]) == tokens(expected["bad"])[:number] and (number == 0) == (first == 0)
            stats = engine.stats()
            assert stats["nonfinite_logits"] == 1 and stats["finished"] == {"error": 1, "length": 1}
            assert stats["generation_tokens"] == number + 8
            assert [record.levelno for record in caplog.records if "request bad" in record.message] == [logging.ERROR]
            # The pages it leaves hold NaN: whoever gets them next must not see it.
            again = serve(engine, {str(i): GREEDY for i in range(6)}, **{str(i): PROMPTS["good"] for i in range(6)})
            assert all(tokens(one) == tokens(expected["good"]) for one in again.values())
            engine.close()


def test_many_errors_are_one_log_line(folder: Path, platform: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(folder)
    for layer in range(2):
        for expert in range(64):
            spoil(engine, layer, expert, float("nan"))
    prompts = {f"x{i}": (i, 1) for i in range(20)}
    found = serve(engine, dict.fromkeys(prompts, GREEDY), **prompts)
    assert all(one[-1].finish_reason == "error" for one in found.values())
    assert engine.stats()["nonfinite_logits"] == 20
    assert sum("NaN" in record.message for record in caplog.records) == 1
    engine.close()


def test_nothing_allowed_is_the_request_s_own_error(folder: Path, platform: str) -> None:
    engine = make(folder)
    none = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=(7,), stop_token_ids=(7,), min_tokens=2)
    found = serve(engine, {"bad": none, "good": GREEDY})
    assert found["bad"][-1].finish_reason == "error" and not tokens(found["bad"])
    assert found["bad"][-1].error == (
        "allowed_token_ids: contradicts min_tokens, no token is allowed after 0 generated tokens"
    )
    assert len(tokens(found["good"])) == 8 and engine.stats()["nonfinite_logits"] == 0
    engine.close()


def test_offline_answers_say_error_and_the_others_are_kept(folder: Path, platform: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, return_routed_experts=True)
    prompts = [list(PROMPTS["bad"]), list(PROMPTS["good"])]
    with LLM(str(folder), **OPTIONS) as llm:
        whole = llm.generate(prompts, params)
        routed = [one.completions[0].routed_experts for one in whole]
        updates = {id: [Update(id, routed_experts=experts)] for id, experts in zip(PROMPTS, routed)}
        spoil(llm.engine, *visited_by_one(updates, 0, 3), float("nan"))
        bad, good = llm.generate(prompts, params)
        assert bad.completions[0].finish_reason == "error" and bad.token_ids == []
        assert good.token_ids == whole[1].token_ids


@pytest.mark.parametrize("graphs", ["none", "full"])
def test_a_wrong_draft_that_gives_nan_disturbs_nobody(
    folder: Path, platform: str, graphs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row has no token, and its keys and values are NaN until the token that takes its place overwrites them."""
    wrong = 7

    class Wrong:
        def propose(self, tokens: list[int], most: int) -> list[int]:
            return [wrong] * most

    monkeypatch.setattr(engine_module, "NgramDrafter", Wrong)
    engine = make(folder, graphs=graphs, speculative="ngram")
    engine.runner.model.embed_tokens.weight.data[wrong] = float("nan")
    params = SamplingParams(max_tokens=24, seed=1, ignore_eos=True, logit_bias={wrong: -100.0})
    found = []
    for drafting in (False, True):
        engine.set_drafting(drafting)
        updates = serve(engine, dict.fromkeys(PROMPTS, params))
        found.append({id: [token for update in mine for token in update.token_ids] for id, mine in updates.items()})
    assert engine.metrics.draft_tokens > 100 and engine.metrics.accepted_tokens == 0
    assert found[0] == found[1] and [len(tokens) for tokens in found[0].values()] == [24, 24]
    engine.close()
