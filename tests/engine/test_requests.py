"""What the engine refuses, what it counts, and how requests end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.config import EngineConfig
from anabranch.engine.engine import Engine, make_engine
from anabranch.request import Request, Update
from anabranch.sampling_params import Grammar, SamplingParams
from tools import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("requests") / "tiny"
    tiny_model.write(folder)
    return folder


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    one = make_engine(EngineConfig(model=str(folder), num_pages=64, page_size=4, max_num_seqs=4))
    yield one
    one.close()


def drain(engine: Engine) -> dict[str, list[Update]]:
    updates: dict[str, list[Update]] = {}
    while engine.has_work:
        for update in engine.step():
            updates.setdefault(update.id, []).append(update)
    return updates


def ask(engine: Engine, prompt=(1, 2, 3), id="x", **params) -> list[Update]:
    engine.add(Request(id=id, prompt_ids=tuple(prompt), params=SamplingParams(**params)))
    return drain(engine)[id]


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((), {}, "the prompt is empty"),
        ((1, 257), {}, r"prompt: token id 257 is not in the vocabulary \[0, 257\)"),
        ((1, -1), {}, "token id -1"),
        ((1,), {"stop_token_ids": (999,)}, "stop_token_ids: token id 999"),
        ((1,), {"allowed_token_ids": (257,)}, "allowed_token_ids: token id 257"),
        ((1,), {"logit_bias": {300: 1.0}}, "logit_bias: token id 300"),
        ((1,) * 256, {}, r"maximum context length is 256 tokens \(the KV pool has 64 pages of 4 tokens\)"),
    ],
)
def test_bad_requests_are_refused_and_disturb_nobody(engine: Engine, prompt, params, message: str) -> None:
    engine.add(Request(id="good", prompt_ids=(1, 2), params=SamplingParams(temperature=0, max_tokens=5)))
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.add(Request(id="bad", prompt_ids=prompt, params=SamplingParams(**params)))
    with pytest.raises(ValueError, match="request id 'good' is in use"):
        engine.add(Request(id="good", prompt_ids=(1,), params=SamplingParams()))
    found = drain(engine)
    assert sum(len(update.token_ids) for update in found["good"]) == 5 and "bad" not in found


def test_the_longest_prompt_that_fits_gets_one_token(engine: Engine) -> None:
    updates = ask(engine, [1] * 255, temperature=0, max_tokens=50)
    assert sum(len(update.token_ids) for update in updates) == 1
    assert updates[-1].finish_reason == "length"


def test_stop_token_ends_it(engine: Engine) -> None:
    tokens = [update.token_ids[0] for update in ask(engine, temperature=0, max_tokens=20)]
    stop = tokens[7]
    updates = ask(engine, temperature=0, max_tokens=20, stop_token_ids=(stop,))
    assert [update.token_ids[0] for update in updates] == tokens[: tokens.index(stop) + 1]
    assert updates[-1].finish_reason == "stop" and updates[-1].stop_token == stop


def test_min_tokens_and_bias_and_allowed(engine: Engine) -> None:
    free = [update.token_ids[0] for update in ask(engine, temperature=0, max_tokens=6)]
    updates = ask(engine, temperature=0, max_tokens=6, min_tokens=4, stop_token_ids=(free[0],))
    assert len(updates) >= 5 and all(update.token_ids[0] != free[0] for update in updates[:4])
    assert {u.token_ids[0] for u in ask(engine, max_tokens=10, allowed_token_ids=(5, 6))} <= {5, 6}
    assert [u.token_ids[0] for u in ask(engine, max_tokens=3, logit_bias={9: 100.0})] == [9] * 3


def test_grammar_holds_and_others_do_not_wait(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=40, grammar=Grammar(regex="[ab]{3}-(yes|no)"), seed=1)
    engine.add(Request(id="g", prompt_ids=(1, 2), params=params))
    engine.add(Request(id="free", prompt_ids=(3, 4), params=SamplingParams(temperature=0, max_tokens=12)))
    found = drain(engine)
    assert engine.tokenizer is not None
    tokens = [token for update in found["g"] for token in update.token_ids]
    text = engine.tokenizer.decode(tokens)
    import re

    assert re.fullmatch("[ab]{3}-(yes|no)", text), text
    assert found["g"][-1].finish_reason == "stop"
    assert sum(len(update.token_ids) for update in found["free"]) == 12


def test_a_complete_grammar_ends_the_request_even_without_end_of_text(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    params = SamplingParams(max_tokens=40, grammar=Grammar(regex="[ab]{3}"), ignore_eos=True)
    engine.add(Request(id="g", prompt_ids=(1, 2), params=params))
    updates = drain(engine)["g"]
    assert updates[-1].finish_reason == "stop" and len(updates) in (3, 4)


@pytest.mark.slow
def test_bad_words_never_appear(engine: Engine) -> None:
    """Even where the model wants nothing else; "abc" is three tokens, so the host must have seen the two before."""
    assert engine.tokenizer is not None
    wanted = engine.tokenizer.encode("abc")
    bias = dict.fromkeys(wanted, 100.0)
    for seed in range(8):
        for words in ((), ("a",), ("abc",)):
            params = SamplingParams(max_tokens=40, logit_bias=bias, seed=seed, bad_words=words)
            engine.add(Request(id=f"{seed} {words}", prompt_ids=(1, 2, 3), params=params))
    tokens = {id: [update.token_ids[0] for update in updates] for id, updates in drain(engine).items()}
    texts = {id: engine.tokenizer.decode(found) for id, found in tokens.items()}
    for word in ("a", "abc"):
        for seed in range(8):
            id = f"{seed} {(word,)}"
            assert word not in texts[id] and len(tokens[id]) == 40
        assert any(word in texts[f"{seed} ()"] for seed in range(8)), "without bad_words it does appear"


def test_a_grammar_that_does_not_compile_fails_its_request_alone(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    engine.add(Request(id="bad", prompt_ids=(1,), params=SamplingParams(grammar=Grammar(regex="("))))
    engine.add(Request(id="good", prompt_ids=(1,), params=SamplingParams(temperature=0, max_tokens=3)))
    found = drain(engine)
    assert found["bad"][-1].finish_reason == "error" and found["bad"][-1].error.count("grammar: ") == 1
    assert found["good"][-1].finish_reason == "length"


def test_prompt_logprobs_survive_preemption(folder: Path) -> None:
    def run(num_pages: int) -> tuple[int, list[list[float | None]]]:
        config = EngineConfig(
            model=str(folder),
            num_pages=num_pages,
            page_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=16,
            max_model_len=80,
        )
        one = make_engine(config)
        params = SamplingParams(temperature=0, max_tokens=15, prompt_logprobs=0)
        for i in range(8):
            one.add(Request(id=str(i), prompt_ids=tuple((7 * i + j) % 250 for j in range(25 + i)), params=params))
        found = drain(one)
        one.close()
        lists = [next(u.prompt_logprobs for u in found[str(i)] if u.prompt_logprobs) for i in range(8)]
        return one.scheduler.num_preemptions, [[p and round(p.logprob, 3) for p in one_list] for one_list in lists]

    (calm, expected), (disturbed, found) = run(200), run(22)
    assert calm == 0 and disturbed > 0
    assert [len(one) for one in found] == [25 + i for i in range(8)]
    assert found == expected


def test_metrics_count_everything(engine: Engine) -> None:
    for i in range(6):
        engine.add(Request(id=str(i), prompt_ids=(i, 1, 2), params=SamplingParams(temperature=0, max_tokens=20)))
    engine.step()
    stats = engine.stats()
    assert (stats["running"], stats["waiting"]) == (4, 2) and 0 < stats["kv_usage"] <= 1
    drain(engine)
    stats = engine.stats()
    assert stats["running"] == stats["waiting"] == 0 and stats["kv_usage"] == 0
    assert stats["prompt_tokens"] == 18 and stats["generation_tokens"] == 120
    assert stats["finished"] == {"length": 6}
    for name, count in (("time_to_first_token", 6), ("inter_token_latency", 114), ("e2e_request_latency", 6)):
        assert sum(stats[f"{name}_seconds"]["counts"]) == count, name
    load = stats["expert_load"]
    assert len(load) == 4 and len(load[0]) == 12
    # Four experts for each token but an answer's last, whose keys and values nobody needs.
    assert [sum(row) for row in load] == [4 * (18 + 120 - 6)] * 4
    assert engine.metrics.clocks == {} and engine.sequences == {}
