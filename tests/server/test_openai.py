"""The real openai client against a running server: what people's programs do."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy
import openai
import pytest
from pydantic import BaseModel, Field

from anabranch.llm import LLM, SamplingParams
from tests.server.serving import NAME, QUICK, Running, Unharmed, running

CHAT: list[Any] = [{"role": "user", "content": "Where does the river go?"}]
RENDERED = "<|user|>Where does the river go?\n<|assistant|>"
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
COMPACT: dict[str, Any] = {"x-guidance": {"whitespace_flexible": False}}
"""In a schema: a model whose text is noise would write spaces for ever."""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Basel", "Bern"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(
        model, "--max-num-seqs", "16", "--num-pages", "600", "--reasoning-parser", "none", key="secret"
    ) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", timeout=QUICK, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """What the offline engine says to CHAT."""
    with LLM(str(model), max_num_seqs=1, num_pages=300) as llm:
        (output,) = llm.generate(RENDERED, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    return output.text


def test_models(client: Any) -> None:
    (found,) = client.models.list().data
    assert found.id == NAME and found.max_model_len == 2048 and found.quantization == "none"
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("gpt-5")
    assert error.value.code == "model_not_found" and error.value.param == "model" and NAME in error.value.message


def test_a_chat_equals_the_offline_engine(client: Any, expected: str) -> None:
    answer = client.chat.completions.create(model=NAME, messages=CHAT, max_completion_tokens=24, **GREEDY)
    (choice,) = answer.choices
    assert choice.message.content == expected and choice.message.role == "assistant"
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert answer.usage.prompt_tokens == len(RENDERED) and answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(RENDERED) + 24
    assert answer.object == "chat.completion" and answer.model == NAME and answer._request_id


def test_the_prefix_cache_is_counted(client: Any) -> None:
    long = [{"role": "user", "content": "once upon a time " * 20}]
    first, second = (
        client.chat.completions.create(model=NAME, messages=long, max_tokens=4, **GREEDY) for _ in range(2)
    )
    assert first.choices[0].message.content == second.choices[0].message.content
    assert 0 < second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    salted = client.chat.completions.create(
        model=NAME, messages=long, max_tokens=4, temperature=0, extra_body={"cache_salt": "mine", "ignore_eos": True}
    )
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat(client: Any, expected: str) -> None:
    with client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        assert stream.response.headers["cache-control"] == "no-cache"
        assert stream.response.headers["content-type"].startswith("text/event-stream")
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") or "\ufffd" in expected for chunk in chunks[:-1])


def test_usage_with_every_chunk(client: Any) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model=NAME, prompt="A river", max_tokens=6, stream=True, stream_options=options, **GREEDY
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 6


def test_the_wire_format_of_a_stream(server: Running) -> None:
    body = {"prompt": "A river", "max_tokens": 3, "temperature": 0, "stream": True}
    text = server.post("/v1/completions", body).text
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: {") for event in events[:-2])


def test_completions_of_every_kind_of_prompt(client: Any, server: Running) -> None:
    def texts(prompt: Any, **options: Any) -> list[str]:
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=8, **GREEDY, **options)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    ids = server.post("/tokenize", {"prompt": "A river"}).json()["tokens"]
    other = server.post("/tokenize", {"prompt": "The sea"}).json()["tokens"]
    (river,), (sea,) = texts("A river"), texts("The sea")
    assert river != sea
    assert texts(ids) == [river]
    assert texts(["A river", "The sea"]) == [river, sea]
    assert texts([other, ids]) == [sea, river]
    assert texts(["A river", "The sea"], n=2) == [river, river, sea, sea]
    assert texts("A river", echo=True) == ["A river" + river]
    assert texts([other], echo=True) == ["The sea" + sea]


def test_many_streams_in_one_request(client: Any) -> None:
    whole = client.completions.create(model=NAME, prompt=["A river", "The sea"], n=2, max_tokens=8, **GREEDY)
    texts = ["", "", "", ""]
    ends = []
    for chunk in client.completions.create(
        model=NAME, prompt=["A river", "The sea"], n=2, max_tokens=8, stream=True, **GREEDY
    ):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices] and sorted(ends) == [0, 1, 2, 3]


def test_n_answers_differ_and_a_seed_repeats_them(client: Any) -> None:
    def texts() -> list[str]:
        answer = client.chat.completions.create(model=NAME, messages=CHAT, n=3, seed=7, temperature=1.5, max_tokens=12)
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert len(set(first)) == 3 and texts() == first


def test_stop_strings_stop(client: Any, expected: str) -> None:
    end = next(letter for letter in expected[4:] if letter.isascii() and letter not in expected[:4])
    answer = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=24, stop=[end, "never"], **GREEDY)
    assert answer.choices[0].message.content == expected[: expected.index(end)]
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].stop_reason == end
    streamed = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=24, stop=end, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected[: expected.index(end)]


def test_chat_logprobs(client: Any) -> None:
    options: dict[str, Any] = {"messages": CHAT, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = client.chat.completions.create(model=NAME, **options).choices[0].logprobs.content
    assert len(whole) == 6
    for item in whole:
        assert item.logprob == max(top.logprob for top in item.top_logprobs) <= 0 and len(item.top_logprobs) == 3
        assert item.token == item.top_logprobs[0].token and item.bytes == item.top_logprobs[0].bytes
    streamed = []
    for chunk in client.chat.completions.create(model=NAME, stream=True, **options):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [item.bytes for item in streamed] == [item.bytes for item in whole]
    assert [item.logprob for item in streamed] == pytest.approx([item.logprob for item in whole], abs=1e-4)


def test_log_likelihoods_as_lm_eval_asks_for_them(server: Running, model: Path) -> None:
    text = "The river joins the sea."
    ids = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    body = {"prompt": [ids], "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert len(found["token_logprobs"]) == len(ids) + 1 == len(found["tokens"]) == len(found["text_offset"])
    with LLM(str(model), max_num_seqs=1, num_pages=300) as llm:
        (output,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    own = [item.logprob for item in output.prompt_logprobs[1:] if item is not None]
    assert found["token_logprobs"][1:-1] == pytest.approx(own, abs=1e-4)
    greedy = [lp == max(top.values()) for lp, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:])]
    assert greedy[:-1] == [item.rank == 1 for item in output.prompt_logprobs[1:] if item is not None]
    assert greedy[-1], "the generated token is the best: the same float stands in both places"


def test_prompt_logprobs_and_token_ids(server: Running) -> None:
    body = {"messages": CHAT, "max_tokens": 3, "temperature": 0, "prompt_logprobs": 2, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body | {"ignore_eos": True}).json()
    assert len(answer["prompt_logprobs"]) == len(RENDERED) == len(answer["prompt_token_ids"])
    assert answer["prompt_logprobs"][0] is None
    for token, found in zip(answer["prompt_token_ids"][1:], answer["prompt_logprobs"][1:]):
        assert str(token) in found and {"logprob", "rank", "decoded_token"} == set(found[str(token)])
    assert len(answer["choices"][0]["token_ids"]) == 3


def test_routed_experts_are_a_numpy_array(server: Running) -> None:
    body = {"prompt": "A river", "max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_routed_experts": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    array = numpy.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    assert array.shape == (len("A river") + 5 - 1, 4, 4) and array.min() >= 0 and array.max() < 12


class Gate(BaseModel):
    kind: Literal["gate"] = "gate"
    open: bool


class Mill(BaseModel):
    kind: Literal["mill"] = "mill"
    wheels: Annotated[int, Field(ge=1, le=9)]


class Bank(BaseModel):
    side: Literal["left", "right"]
    on_it: Annotated[list[Annotated[Gate | Mill, Field(discriminator="kind")]], Field(max_length=2)]


def test_schemas_as_clients_send_them(client: Any, thorough: bool) -> None:
    """None of them says additionalProperties, which is how keys were invented until max_tokens."""
    schema = Bank.model_json_schema()
    assert "additionalProperties" not in json.dumps(schema) and "oneOf" in schema["properties"]["on_it"]["items"]
    tool = {"type": "function", "function": {"name": "Bank", "description": "a bank", "parameters": schema}}
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "Bank", "schema": schema}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "Bank", "schema": schema, "strict": False},
            }
        },
        {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "Bank"}}},  # instructor
        {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False},
        {"extra_body": {"guided_json": schema}},
    ]

    def ask(seed: int) -> Any:
        body = bodies[seed % len(bodies)]
        return client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=400, seed=seed, **body)

    num_answers = (2 if thorough else 1) * len(bodies)
    with ThreadPoolExecutor(num_answers) as pool:
        answers = list(pool.map(ask, range(num_answers)))
    for answer in answers:
        message, reason = answer.choices[0].message, answer.choices[0].finish_reason
        assert reason in ("stop", "tool_calls"), message
        text = message.tool_calls[0].function.arguments if message.tool_calls else message.content
        Bank.model_validate_json(text)
        assert set(json.loads(text)) == {"side", "on_it"}

    parsed = client.chat.completions.parse(model=NAME, messages=CHAT, max_tokens=400, seed=1, response_format=Tied)
    assert parsed.choices[0].message.parsed.bank in ("left", "right")


class Tied(BaseModel):
    bank: Literal["left", "right"]
    knots: Annotated[int, Field(ge=0, le=9)] | None


def test_structured_output(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Basel", "Bern"]}, "rivers": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city", "rivers"],
        "additionalProperties": False,
        **COMPACT,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=NAME, messages=CHAT, max_tokens=200, temperature=0, response_format=wanted
    )
    found = json.loads(answer.choices[0].message.content)
    assert set(found) == {"city", "rivers"} and found["city"] in ("Basel", "Bern") and 0 <= found["rivers"] <= 9
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("constraint", "allowed"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"structured_outputs": {"regex": "a{3}|b{4}"}}, ("aaa", "bbbb")),
        ({"guided_choice": ["left", "right"]}, ("left", "right")),
        ({"structured_outputs": {"grammar": 'start: "up" | "down"'}}, ("up", "down")),
        ({"structured_outputs": {"json": {"enum": [1, 22]}}}, ("1", "22")),
    ],
)
def test_structured_output_in_vllms_words(client: Any, constraint: Any, allowed: tuple[str, ...]) -> None:
    answer = client.completions.create(model=NAME, prompt="So", max_tokens=20, temperature=0, extra_body=constraint)
    assert answer.choices[0].text.strip() in allowed and answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_tool_call_that_must_come(client: Any, choice: Any) -> None:
    tools: Any = [WEATHER] if choice == "required" else [TIME, WEATHER]
    options: dict[str, Any] = {"messages": CHAT, "tools": tools, "tool_choice": choice, "max_tokens": 300}
    answer = client.chat.completions.create(model=NAME, temperature=0, **options)
    (found,) = answer.choices
    assert found.finish_reason == "tool_calls", found
    call = found.message.tool_calls[0]
    assert call.function.name == "get_weather" and call.type == "function" and call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Basel", "Bern") and arguments["days"] in (1, 2)

    name, text, ids, reasons = "", "", [], []
    for chunk in client.chat.completions.create(model=NAME, temperature=0, stream=True, **options):
        for piece in chunk.choices[0].delta.tool_calls or []:
            if piece.index == 0:
                name += piece.function.name or ""
                text += piece.function.arguments or ""
                ids += [piece.id] if piece.id else []
        reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
    assert (name, text, reasons) == ("get_weather", call.function.arguments, ["tool_calls"]) and len(ids) == 1


def test_a_conversation_with_tools_goes_on(client: Any, server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    history = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "call_1", "content": "noon"}]
    answer = client.chat.completions.create(model=NAME, messages=history, tools=[TIME], max_tokens=4, **GREEDY)
    assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")
    silent = client.chat.completions.create(
        model=NAME, messages=CHAT, tools=[TIME], tool_choice="none", max_tokens=4, **GREEDY
    )
    assert silent.choices[0].message.tool_calls is None
    assert silent.usage.prompt_tokens == len(RENDERED), "tools that may not be called are not in the prompt"


def test_reasoning_comes_back_into_the_prompt(server: Running) -> None:
    def rendered(**message: Any) -> str:
        messages = [*CHAT, {"role": "assistant", "content": "sea", **message}]
        tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
        return str(server.post("/detokenize", {"tokens": tokens}).json()["prompt"])

    assert "<think>" not in rendered()
    assert "<think>downhill</think>sea" in rendered(reasoning_content="downhill") == rendered(reasoning="downhill")


def test_tokens_there_and_back(server: Running) -> None:
    text = "Größe, 河川, 👍🏽"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(text.encode()) == len(answer["token_strs"]) and answer["max_model_len"] == 2048
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert server.post("/tokenize", {"messages": CHAT}).json()["count"] == len(RENDERED)
    template = server.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False}).json()
    assert template["count"] == len(RENDERED.removesuffix("<|assistant|>"))


def test_errors_are_the_clients_exceptions(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=NAME, messages=CHAT, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="x" * 2048, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    assert "This model's maximum context length is 2048 tokens" in long.value.message
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_the_client_does_not_repeat_what_fails_again(server: Running) -> None:
    """The client retries 408, 409, 429 and ≥ 500: the same mistake must reach the server once."""

    def refused() -> float:
        found = [line for line in server.get("/metrics").text.splitlines() if 'completions",status="400"' in line]
        return sum(float(line.split()[-1]) for line in found)

    before = refused()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=2) as client:
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=NAME, messages=CHAT, top_p=7)
    assert refused() == before + 1


def test_fields_clients_send_along(server: Running) -> None:
    extras = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "logit_bias": {"65": 100},
        "stop": None,
        "n": 1,
        "priority": -1,
        "min_tokens": 2,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "bad_words": ["sea"],
        "stop_token_ids": [3],
        "functions": None,
    }
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4, **extras})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4


def test_sixteen_at_once_are_each_right(server: Running, client: Any) -> None:
    prompts = [f"Stream {i} goes" for i in range(16)]
    alone = [server.complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(server.complete, prompts))
    assert together == alone


def test_the_same_request_id_twice(server: Running) -> None:
    def ask(_: int) -> Any:
        body = {"prompt": "A river", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        return server.post("/v1/completions", body, headers={"x-request-id": "again"})

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(ask, range(2))
    assert first.json()["choices"] == second.json()["choices"] and first.json()["id"] != second.json()["id"]
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "again"


def test_langchain_calls_tools(server: Running) -> None:
    import langchain_openai as langchain

    chat = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="secret", model=NAME, temperature=0, max_tokens=300, stream_usage=True
    )
    answer = chat.bind_tools([WEATHER], tool_choice="get_weather").invoke("Where does the river go?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in ("Basel", "Bern") and not answer.invalid_tool_calls

    def used(answer: Any, result: str) -> int:
        """Tokens of the prompt when the chat goes on with the tool's result."""
        history = [("user", "Where does the river go?"), answer]
        history.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        told = chat.bind_tools([WEATHER]).invoke(history, max_tokens=4)
        return int(told.usage_metadata["input_tokens"])

    assert used(answer, "sunshine") == used(answer, "sun") + len("shine")
    written = '<tool_call>\n{"name": "get_weather", "arguments": ' + json.dumps(call["args"]) + "}\n</tool_call>"
    assert used(answer, "sun") == used(("assistant", written), "sun")
    merged = None
    for chunk in chat.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False).stream("Where to?"):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None and [one["name"] for one in merged.tool_calls] == ["get_weather"]
    assert merged.usage_metadata["output_tokens"] > 0
    place = {"title": "place", "type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    place |= {"additionalProperties": False, **COMPACT}
    assert chat.with_structured_output(place, method="json_schema").invoke("How many?")["n"] in (1, 2)
    with pytest.raises(Exception, match="maximum context length"):
        chat.invoke("x" * 3000)


def test_after_all_that(server: Running) -> None:
    unharmed = Unharmed(server)
    unharmed.check()
    assert "Where does the river go" not in server.log() and "A river" not in server.log(), "prompts are not logged"
    name = server.get("/v1/models").headers["x-request-id"]
    server.wait_for(rf"request .*id={name} method=GET route=/v1/models status=200")
