"""The offline front door: text in, text out, streams, mistakes."""

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from anabranch.llm import LLM, SamplingParams
from anabranch.request import Update
from tests.models import tiny
from tests.text import tiny_tokenizers
from tools import tiny_model

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("llm") / "tiny"
    tiny_model.write(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return LLM(str(folder), num_pages=128, max_num_seqs=8)


GREEDY = SamplingParams(temperature=0, max_tokens=16)


def test_prompts_as_text_and_as_ids(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text, ids = "A river divides", llm.tokenizer.encode("A river divides")
    one, two = llm.generate([text, ids], GREEDY)
    (alone,) = llm.generate(text, GREEDY)
    assert one.text == two.text == alone.text and len(one.token_ids) == 16
    assert one.prompt == text and two.prompt is None and two.prompt_ids == ids
    assert one.completions[0].finish_reason == "length"


def test_as_users_of_vllm_write_it(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    import anabranch

    assert anabranch.LLM is LLM
    params = anabranch.SamplingParams(temperature=0, max_tokens=5, logprobs=0)
    prompts = ["A river divides", {"prompt": "A river divides"}]
    ids = llm.get_tokenizer().encode("A river divides")
    outs = llm.generate([*prompts, {"prompt_token_ids": ids}], sampling_params=params, use_tqdm=False)
    assert capsys.readouterr().err == ""
    for out in outs:
        (one,) = out.outputs
        assert (one.text, one.token_ids, one.finish_reason) == (out.text, out.token_ids, "length") and out.finished
        assert out.prompt_token_ids == ids and out.num_cached_tokens <= len(ids)
        assert one.cumulative_logprob == pytest.approx(sum(token.logprob for token in one.logprobs)) and one.logprobs
    assert len({out.request_id for out in outs}) == 3 and len({out.outputs[0].text for out in outs}) == 1
    assert llm.generate({"prompt": "A river divides"}, params)[0].text == outs[0].text
    messages = [{"role": "user", "content": "hello"}]
    (out,) = llm.chat(messages, sampling_params=params, use_tqdm=False, chat_template_kwargs={"unused": 1})
    assert out.outputs[0].text == llm.chat(messages, params, unused=1)[0].text


def test_one_params_each(llm: LLM) -> None:
    short, long = llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=9)])
    assert (len(short.token_ids), len(long.token_ids)) == (2, 9)
    with pytest.raises(ValueError, match="2 prompts, but 3 SamplingParams"):
        llm.generate(["a", "b"], [GREEDY] * 3)


def test_n_completions_differ_and_repeat_with_a_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=5)
    first, again = (llm.generate("once", params)[0] for _ in range(2))
    texts = [completion.text for completion in first.completions]
    assert len(set(texts)) == 3 and texts == [completion.text for completion in again.completions]
    assert [completion.index for completion in first.completions] == [0, 1, 2]


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63 - 2, -(2**63)])
def test_n_completions_differ_with_the_largest_seeds(llm: LLM, seed: int) -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=seed)
    first, again = (llm.generate("once", params)[0] for _ in range(2))
    texts = [completion.text for completion in first.completions]
    assert len(set(texts)) == 3 and texts == [completion.text for completion in again.completions]
    (alone,) = llm.generate("once", replace(params, n=1))
    assert alone.text == texts[0]


def test_a_stop_string_is_not_in_the_text_and_ends_the_request(llm: LLM) -> None:
    (free,) = llm.generate("once", SamplingParams(max_tokens=40, seed=3))
    stop = next(c for c in free.text[10:] if c.isascii())
    (cut,) = llm.generate("once", SamplingParams(max_tokens=40, seed=3, stop=stop))
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.completions[0].finish_reason == "stop" and cut.completions[0].stop_reason == stop
    (shown,) = llm.generate("once", SamplingParams(max_tokens=40, seed=3, stop=stop, include_stop_str_in_output=True))
    assert shown.text == cut.text + stop
    assert llm.stats()["running"] == 0 and llm.stats()["kv_usage"] == 0


def collect(llm: LLM, prompt: str, params: SamplingParams, take: int | None = None) -> list:
    async def run() -> list:
        deltas = []
        async for delta in llm.stream(prompt, params):
            deltas.append(delta)
            if take is not None and len(deltas) == take:
                break
        return deltas

    return asyncio.run(run())


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=40, seed=3, stop=("e", "q", "Z"))])
def test_streamed_text_is_the_final_text(llm: LLM, params: SamplingParams) -> None:
    deltas = collect(llm, "once upon", params)
    (whole,) = llm.generate("once upon", params)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
    assert deltas[-1].completion.finish_reason == whole.completions[0].finish_reason


FAMILIES = {case.model_type: case for case in reversed(tiny.CASES)}
SEEDS = {"qwen3_5_moe": 2}  # where a stop string would come at once
KIND_OF_TOKENIZER = {"mixtral": "llama", "llama": "unigram", "gemma4_text": "gemma"}


# Of families with one tokenizer and the same kinds of cache groups, one always runs; gemma4 is gemma4_text to it.
USUAL = {"gemma4_text", "llama", "mixtral", "qwen3_5_moe"}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in USUAL)) for name in FAMILIES if name != "gemma4"],
)
def test_streamed_text_is_the_final_text_for_every_family(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    folder = tiny_tokenizers.write(KIND_OF_TOKENIZER.get(family, "qwen"), tmp_path)
    tiny.save(replace(case, seed=SEEDS.get(family, case.seed), settings=case.settings | {"vocab_size": 640}), folder)
    llm = LLM(str(folder), dtype="float32", num_pages=128, max_num_seqs=8, max_model_len=128)
    # Tokens at random: bytes that are parts of a character, or of none.
    all_params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(max_tokens=40, seed=3),
        SamplingParams(max_tokens=40, seed=4, stop=("e", "r ", "fish")),
        SamplingParams(temperature=2.0, max_tokens=40, seed=5, top_k=200, skip_special_tokens=False),
    ]

    async def one(params: SamplingParams) -> list:
        return [delta async for delta in llm.stream("The river divides", params)]

    async def together() -> list[list]:
        return await asyncio.gather(*map(one, all_params))

    streams = [*asyncio.run(together()), *(collect(llm, "The river divides", params) for params in all_params)]
    answers = llm.generate(["The river divides"] * len(all_params), all_params)
    for whole, deltas in zip(answers * 2, streams, strict=True):
        assert whole.text and "".join(delta.text for delta in deltas) == whole.text
        assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
        assert deltas[-1].completion.finish_reason == whole.completions[0].finish_reason


def test_streams_run_together(llm: LLM) -> None:
    async def one(prompt: str) -> str:
        return "".join([delta.text async for delta in llm.stream(prompt, GREEDY)])

    async def many() -> list[str]:
        return await asyncio.gather(*(one(f"prompt {i}") for i in range(6)))

    before = llm.stats()["steps"]
    texts = asyncio.run(many())
    assert llm.stats()["steps"] - before < 3 * 17  # batched: not six times sixteen steps
    assert texts == [output.text for output in llm.generate([f"prompt {i}" for i in range(6)], GREEDY)]


def test_closing_waits_for_the_step_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is given back then, which the step would read."""
    tiny_model.write(tmp_path)
    with LLM(tmp_path, max_model_len=64) as own:
        step, events = own.engine.step, list[str]()

        def slow() -> list[Update]:
            events.append("begin")
            time.sleep(0.1)
            found = step()
            events.append("end")
            return found

        monkeypatch.setattr(own.engine, "step", slow)

        async def consume() -> None:
            with pytest.raises(ValueError, match="the engine is closed"):
                [delta async for delta in own.stream([5, 9, 2], GREEDY)]

        async def run() -> None:
            task = asyncio.create_task(consume())
            while events.count("begin") == events.count("end"):
                await asyncio.sleep(0.01)
            own.close()
            events.append("closed")
            await task

        asyncio.run(run())
        assert events[: events.index("closed") + 1] == ["begin", "end", "closed"]


def test_leaving_a_stream_aborts_the_request(llm: LLM) -> None:
    assert len(collect(llm, "once", SamplingParams(max_tokens=400), take=3)) == 3
    assert llm.stats()["running"] == 0 and llm.stats()["kv_usage"] == 0


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (answer,) = llm.chat(messages, GREEDY)
    (same,) = llm.generate("<user>hello<a>", GREEDY)
    assert answer.text == same.text
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_a_generator_of_prompts(llm: LLM) -> None:
    expected = [output.text for output in llm.generate(["a", "b"], GREEDY)]
    assert [output.text for output in llm.generate((prompt for prompt in ["a", "b"]), GREEDY)] == expected
    messages = [{"role": "user", "content": "hello"}]
    assert llm.chat(iter(messages), GREEDY)[0].text == llm.chat(messages, GREEDY)[0].text
    assert LLM(Path(llm.engine.config.model), num_pages=16).engine.config.model == llm.engine.config.model


def test_an_answer_is_clipped_to_what_the_context_leaves(llm: LLM) -> None:
    with LLM(llm.engine.config.model, num_pages=128, max_model_len=64) as small:
        (output,) = small.generate("x" * 60, SamplingParams(temperature=0, max_tokens=10**9, ignore_eos=True))
    assert len(output.token_ids) == 64 - len(output.prompt_ids) and output.completions[0].finish_reason == "length"


def test_logprobs_travel(llm: LLM) -> None:
    (output,) = llm.generate("once", SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=0))
    assert output.completions[0].logprobs is not None and output.prompt_logprobs is not None
    for token, found in zip(output.token_ids, output.completions[0].logprobs, strict=True):
        assert found.token_id == token and found.rank == 1
        assert found.top[0] == (token, found.logprob) and len(found.top) == 3
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(output.prompt_ids)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(["good", ""], GREEDY), "the prompt is empty"),
        (lambda llm: llm.generate([[1, 2], [1, "x"]], GREEDY), "must hold integers only"),
        (lambda llm: llm.generate([[1, 999]], GREEDY), "token id 999"),
        (lambda llm: llm.generate("x" * 5000, GREEDY), "maximum context length"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], GREEDY, messages=[]), "."),
        (lambda llm: llm.generate(None), "prompts must be text, a list of token ids, or a list or gen.* not None"),
        (lambda llm: llm.generate(5), "prompts must be .*, not 5"),
        (lambda llm: llm.generate({"text": "x"}), "prompts must be .*, not dict"),
        (lambda llm: llm.generate({"prompt": "x", "image": 1}), "a prompt has prompt or .*, and no 'image'"),
        (lambda llm: llm.generate("x", GREEDY, sampling_params=GREEDY), "params and sampling_params are the same"),
        (lambda llm: llm.generate({"x"}), "prompts must be .*, not set"),
        (lambda llm: llm.generate(b"x"), "prompts must be .*, not bytes"),
        (lambda llm: llm.generate(torch.tensor([1, 2])), "prompts must be .*, not Tensor"),
        (lambda llm: llm.generate(""), "the prompt is empty"),
        (lambda llm: llm.generate(["x", b"x"]), "prompt 1: a prompt must be text or a list of token ids, not bytes"),
        (lambda llm: llm.generate(["x", 1]), "prompt 1: a prompt must be text or a list of token ids, not 1"),
        (lambda llm: llm.generate([None]), "a prompt must be text or a list of token ids, not None"),
        (lambda llm: llm.generate([-1]), "token id -1 is not in the vocabulary"),
        (lambda llm: llm.generate([10**30]), "token id 10+ is not in the vocabulary"),
        (lambda llm: llm.generate("x", {"max_tokens": 2}), r"not dict; write SamplingParams\(\*\*params\)"),
        (lambda llm: llm.generate("x", "fast"), "params must be SamplingParams, .*, not str"),
        (lambda llm: llm.generate(["x"], [{"max_tokens": 2}]), "params must be SamplingParams, .*, not dict"),
        (lambda llm: llm.generate(["x"], []), "1 prompts, but 0 SamplingParams"),
        (lambda llm: llm.generate("x", priority="high"), "priority must be an integer, not str"),
        (lambda llm: llm.generate("x", cache_salt=5), "cache_salt must be text, not 5"),
        (lambda llm: llm.stream("x", {"max_tokens": 2}), "params must be SamplingParams, .*, not dict"),
        (lambda llm: collect(llm, None, GREEDY), "a prompt must be text or a list of token ids, not None"),
        (lambda llm: llm.chat(None), "messages must be a list of messages, or of such lists, not None"),
        (lambda llm: llm.chat("hello"), "messages must be a list of messages, or of such lists, not str"),
        (lambda llm: llm.chat({"role": "user"}), "messages must be a list of messages, or of such lists, not dict"),
        (lambda llm: llm.chat(["hello"]), "a conversation must be a list of messages, not str"),
        (lambda llm: llm.chat([]), "messages is empty"),
        (lambda llm: llm.render([{"role": "user", "content": "x"}], {"name": "f"}), "tools must be a list of tools"),
        (lambda llm: LLM(""), "the name of the model is empty; give an existing folder or a hub id"),
        (lambda llm: LLM(5), "model must be a folder or a hub id owner/name, not 5"),
        (lambda llm: LLM(b"x"), "model must be a folder or a hub id owner/name, not bytes"),
        (lambda llm: LLM([]), "model must be a folder or a hub id owner/name, not list"),
        (lambda llm: SamplingParams(top_p=2.0), r"top_p must lie in \(0, 1\], not 2.0"),
    ],
)
def test_mistakes_raise_before_anything_runs(llm: LLM, call, message: str) -> None:
    steps = llm.stats()["steps"]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call(llm)
    assert "\n" not in str(caught.value)
    stats = llm.stats()
    assert stats["steps"] == steps and stats["running"] == stats["waiting"] == 0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_full_step_runs_while_more_prompts_are_added(
    llm: LLM, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3 + i, 7, 11, 5 + i, 9, 30 - i] for i in range(9)]
    expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    folder = llm.engine.config.model
    with LLM(folder, num_pages=128, max_num_batched_tokens=16, async_scheduling=async_scheduling) as small:
        begun: list[int] = []
        step = small.engine.step

        def watched() -> list[Update]:
            begun.append(small.engine.num_arrived)
            return step()

        monkeypatch.setattr(small.engine, "step", watched)
        assert [output.token_ids for output in small.generate(prompts, GREEDY)] == expected
        assert begun[:2] == [3, 9], "three prompts fill a step"
        with pytest.raises(ValueError, match="integers"):
            small.generate([*prompts, ["x"]], GREEDY)  # type: ignore[list-item]
        assert [output.token_ids for output in small.generate(prompts, GREEDY)] == expected


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown option 'max_model_length'; did you mean 'max_model_len'"):
        LLM("nowhere", max_model_length=5)


def test_a_context_longer_than_the_models_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="max_model_len 4096 is more than the model's own limit of 2048 tokens"):
        LLM(llm.engine.config.model, max_model_len=4096)


def test_requests_join_and_leave_only_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run in a thread of their own; the engine is not made to be changed meanwhile."""
    stepping, clashes = [False], []
    step, add, abort = llm.engine.step, llm.engine.add, llm.engine.abort

    def slow_step() -> list:
        stepping[0] = True
        time.sleep(0.005)
        updates = step()
        stepping[0] = False
        return updates

    def watched(name, function):
        def call(*arguments):
            if stepping[0]:
                clashes.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine, "add", watched("add", add))
    monkeypatch.setattr(llm.engine, "abort", watched("abort", abort))

    async def one(i: int) -> None:
        await asyncio.sleep(0.003 * i)
        count = 0
        async with contextlib.aclosing(llm.stream(f"prompt {i}", GREEDY)) as deltas:
            async for _ in deltas:
                count += 1
                if i % 3 == 0 and count == 4:
                    break

    async def many() -> None:
        await asyncio.gather(*(one(i) for i in range(9)))

    asyncio.run(many())
    assert clashes == []
    assert llm.stats()["running"] == 0 and llm.stats()["kv_usage"] == 0
