"""The real anthropic client against a running server, on a model whose every word is known beforehand."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.serving import NAME, QUICK, TEMPLATE, Running, running, write_model

pytestmark = pytest.mark.usefixtures("unharmed")

CYCLE = "Hum</think>"
"""What the model says, again and again: each letter is followed by the next."""
KEY = "secret"
CONTEXT = 1024
MAX_BODY = 1_000_000
HELLO: list[Any] = [{"role": "user", "content": "Where does the river go?"}]
RENDERED = "<|user|>Where does the river go?\n<|assistant|>"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Basel", "Bern"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
WEATHER: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}
TIME: Any = {"name": "get_time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}


def write_speaker(folder: Path) -> Path:
    """A model without a past: layers add nothing, and the output weights of each letter point at the one before it."""
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    sign = torch.randn(257, 64, generator=torch.Generator().manual_seed(0)).sign()
    from anabranch.text.tokenizer import Tokenizer

    letters = Tokenizer(folder).encode(CYCLE, add_special_tokens=False)
    assert len(set(letters)) == len(CYCLE)
    head = torch.zeros(257, 64)
    head[letters] = sign[letters[-1:] + letters[:-1]]
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = sign, head
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "chat_template.jinja").write_text(TEMPLATE.rstrip() + "{% if enable_thinking %}<think>{% endif %}")
    return folder


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("model") / NAME)


@pytest.fixture(scope="module")
def server(speaker: Path) -> Iterator[Running]:
    flags = ("--max-num-seqs", "8", "--num-pages", "600", "--max-model-len", str(CONTEXT))
    with running(speaker, *flags, "--max-body-bytes", str(MAX_BODY), key=KEY) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, timeout=QUICK, max_retries=0) as client:
        yield client


def ask(**options: Any) -> dict[str, Any]:
    """A call of the client's. It has no word for temperature any more."""
    extra = {"temperature": options.pop("temperature", 0)}
    return {"model": NAME, "messages": HELLO, "max_tokens": 30, "extra_body": extra, **options}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HELLO, "max_tokens": 30, "temperature": 0, **fields}


def same(one: Any, other: Any) -> bool:
    """But for ids, and for what is in the cache."""
    mine, theirs = (message.model_dump(exclude={"id", "usage"}) for message in (one, other))
    for content in (mine["content"], theirs["content"]):
        for block in content:
            block.pop("id", None)
    counts = [message.usage.input_tokens + message.usage.cache_read_input_tokens for message in (one, other)]
    return mine == theirs and counts[0] == counts[1] and one.usage.output_tokens == other.usage.output_tokens


# Answers.


def test_a_message(client: Any) -> None:
    answer = client.messages.create(**ask())
    (block,) = answer.content
    assert (block.type, block.text) == ("text", (CYCLE * 3)[:30])
    assert (answer.type, answer.role, answer.model, answer.stop_reason) == ("message", "assistant", NAME, "max_tokens")
    assert answer.id.startswith("msg_") and answer._request_id.startswith("req-")
    used = answer.usage
    assert used.input_tokens + used.cache_read_input_tokens == len(RENDERED) and used.output_tokens == 30
    again = client.messages.create(**ask())
    assert same(answer, again) and again.id != answer.id and again.usage.cache_read_input_tokens > 0


def test_a_stream_is_the_message_in_pieces(client: Any) -> None:
    """Long enough to come in pieces, however fast the engine is."""
    options = ask(max_tokens=330)
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert same(stream.get_final_message(), whole)
    events = list(client.messages.create(**options, stream=True))
    kinds = [event.type for event in events]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas > 10, "it comes as it grows"
    assert kinds == [
        *("message_start", "content_block_start"),
        *["content_block_delta"] * num_deltas,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0].message.content == [] and events[0].message.usage.output_tokens == 0
    assert events[-2].usage.output_tokens == 330 and events[-2].delta.stop_reason == "max_tokens"


def test_the_wire_format_of_a_stream(server: Running) -> None:
    answer = server.post("/v1/messages", body(stream=True, max_tokens=2))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    events = answer.text.split("\n\n")
    assert events.pop() == "" and events[-1] == 'event: message_stop\ndata: {"type":"message_stop"}'
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


def test_the_beta_client(client: Any) -> None:
    answer = client.beta.messages.create(**ask(), betas=["context-management-2025-06-27"])
    assert answer.content[0].text == (CYCLE * 3)[:30]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(client: Any, stream: bool) -> None:
    options = ask(stop_sequences=["zebra", "in", "k"])
    if stream:
        with client.messages.stream(**options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
    assert answer.content[0].text == "Hum</th"
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "in")
    assert answer.usage.output_tokens == len("Hum</thin")


def test_structured_output(client: Any) -> None:
    wanted = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = client.messages.create(**ask(output_config=wanted, max_tokens=100))
    (block,) = answer.content
    assert block.text.startswith('{"city":"B') and answer.stop_reason == "end_turn"


def test_thoughts(client: Any, server: Running) -> None:
    options = ask(thinking=THINKING)
    answer = client.messages.create(**options)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == "Hum" and answer.content[1].text == (CYCLE * 3)[len(CYCLE) : 30]
    with client.messages.stream(**options) as stream:
        pieces = [event.thinking for event in stream if event.type == "thinking"]
        assert "".join(pieces) == "Hum" and same(stream.get_final_message(), answer)
    hidden = client.messages.create(**ask(thinking={"type": "adaptive", "display": "omitted"}))
    assert [block.type for block in hidden.content] == ["text"] and hidden.content[0].text == answer.content[1].text
    other = {"messages": HELLO, "max_tokens": 30, "temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}
    (choice,) = server.post("/v1/chat/completions", other).json()["choices"]
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == "Hum"
    assert choice["message"]["content"] == answer.content[1].text


def test_a_thought_comes_back_into_the_prompt(client: Any, server: Running) -> None:
    answer = client.messages.create(**ask(thinking=THINKING))
    messages = [*HELLO, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "And?"}]
    rendered = f"<|user|>{HELLO[0]['content']}\n<|assistant|><think>Hum</think>{answer.content[1].text}\n"
    rendered += "<|user|>And?\n<|assistant|>"
    assert client.messages.count_tokens(model=NAME, messages=messages).input_tokens == len(rendered)


# Answers that are continued.


@pytest.mark.parametrize("begun", ["Hu", [{"type": "text", "text": "Hu"}], "Hum</think>Hu"])
def test_a_prefill_is_continued(client: Any, server: Running, begun: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": begun}]
    answer = client.messages.create(**ask(messages=messages, max_tokens=20))
    assert answer.content[0].text == (CYCLE * 3)[2:22]
    text = begun if isinstance(begun, str) else "Hu"
    used = answer.usage
    assert used.input_tokens + used.cache_read_input_tokens == len(RENDERED + text)
    assert client.messages.count_tokens(model=NAME, messages=messages).input_tokens == len(RENDERED + text)
    with client.messages.stream(**ask(messages=messages, max_tokens=20)) as stream:
        assert same(stream.get_final_message(), answer)


def test_a_final_message_is_continued_in_openais_dialect(server: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "<|user|> Hu"}]
    wanted = {"messages": messages, "max_tokens": 9, "temperature": 0, "continue_final_message": True}
    for more in ({"add_generation_prompt": False}, {}):
        (choice,) = server.post("/v1/chat/completions", wanted | more).json()["choices"]
        assert choice["message"]["content"] == "m</think>"
    thought = [*HELLO, {"role": "assistant", "content": "<think>Hu"}]
    (choice,) = server.post("/v1/chat/completions", wanted | {"messages": thought, "max_tokens": 11}).json()["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("m", "Hu")
    count = server.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["count"]
    assert count == len(RENDERED + "<|user|> Hu")
    for wrong, param in (
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"messages": HELLO}, "messages"),
        ({"chat_template_kwargs": {"continue_final_message": True}}, "messages"),
    ):
        answer = server.post("/v1/chat/completions", wanted | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_message_that_calls_tools_is_not_continued(client: Any) -> None:
    call = {"type": "tool_use", "id": "1", "name": "get_time", "input": {}}
    with pytest.raises(anthropic.BadRequestError, match="calls no tools"):
        client.messages.create(**ask(messages=[*HELLO, {"role": "assistant", "content": [call]}], tools=[TIME]))


# Tools.


@pytest.mark.parametrize("thinking", [None, THINKING])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_tool_call_that_must_come(client: Any, choice: Any, thinking: Any) -> None:
    tools = [WEATHER] if choice["type"] == "any" else [TIME, WEATHER]
    options = ask(tools=tools, tool_choice={**choice, "disable_parallel_tool_use": True}, max_tokens=300)
    options |= {"thinking": thinking} if thinking else {}
    answer = client.messages.create(**options)
    *thoughts, call = answer.content
    assert [block.thinking for block in thoughts] == (["Hum"] if thinking else [])
    assert (call.type, call.name, answer.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Basel", "Bern") and call.input["days"] in (1, 2) and len(call.input) == 2
    with client.messages.stream(**options) as stream:
        sent = [event.partial_json for event in stream if event.type == "input_json"]
        assert sent and same(stream.get_final_message(), answer)


def test_a_conversation_with_tools_goes_on(client: Any, server: Running) -> None:
    options = ask(tools=[TIME], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=100)
    (call,) = client.messages.create(**options).content
    assert (call.name, call.input) == ("get_time", {})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "noon"}]}
    messages = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    options = {"model": NAME, "messages": messages, "tools": [TIME], "system": "Be brief."}
    count = client.messages.count_tokens(**options).input_tokens
    used = client.messages.create(**options, max_tokens=5).usage
    assert used.input_tokens + used.cache_read_input_tokens == count
    function = {"id": call.id, "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    same_in_openai = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    tool = {"type": "function", "function": {"name": "get_time", "parameters": TIME["input_schema"]}}
    assert server.post("/tokenize", {"messages": same_in_openai, "tools": [tool]}).json()["count"] == count


def test_tools_that_may_not_be_called(client: Any) -> None:
    silent = client.messages.create(**ask(tools=[TIME], tool_choice={"type": "none"}))
    assert silent.usage.input_tokens + silent.usage.cache_read_input_tokens == len(RENDERED)
    assert [block.type for block in silent.content] == ["text"]


# Other routes.


def test_models_in_the_clients_dialect(client: Any, server: Running) -> None:
    listed = client.models.list()
    assert [model.id for model in listed] == [NAME] and not listed.has_more
    (model,) = listed.data
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", NAME, CONTEXT)
    assert client.models.retrieve(NAME) == model
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("claude")
    assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.body["type"] == "error"
    assert server.get("/v1/models").json()["object"] == "list"


def test_unknown_routes_answer_in_the_clients_dialect(client: Any, server: Running) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.list()
    assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.request_id
    assert server.get("/v1/messagesx").json().keys() == {"error"}


# Keys, errors, faults.


def test_keys_as_clients_send_them(server: Running) -> None:
    for good in ({"api_key": KEY}, {"auth_token": KEY}):
        with anthropic.Anthropic(base_url=server.url, timeout=QUICK, **good) as client:
            assert client.messages.count_tokens(model=NAME, messages=HELLO).input_tokens == len(RENDERED)
    for wrong in ({"api_key": "x"}, {"auth_token": "x"}):
        with anthropic.Anthropic(base_url=server.url, timeout=QUICK, **wrong) as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                client.messages.create(**ask())
            assert caught.value.body["type"] == "error"
            assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_clients_exceptions(client: Any, stream: bool) -> None:
    def refused(kind: Any, **options: Any) -> Any:
        with pytest.raises(kind) as caught:
            client.messages.create(**ask(**options), stream=stream)
        assert caught.value.body["type"] == "error" and caught.value.request_id == caught.value.body["request_id"]
        return caught.value.body["error"]

    assert refused(anthropic.BadRequestError, temperature=-1)["param"] == "temperature"
    assert refused(anthropic.BadRequestError, temperature=-1)["type"] == "invalid_request_error"
    assert refused(anthropic.NotFoundError, model="claude")["type"] == "not_found_error"
    long = refused(anthropic.BadRequestError, messages=[{"role": "user", "content": "x" * CONTEXT}])
    assert long["code"] == "context_length_exceeded" and long["message"].startswith("prompt is too long")
    large = refused(anthropic.RequestTooLargeError, system="x" * MAX_BODY)
    assert large["type"] == "request_too_large"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    shown = refused(anthropic.BadRequestError, messages=[{"role": "user", "content": [image]}])
    assert "takes text" in shown["message"]
    schema = {"type": "json_schema", "schema": {"type": "nonsense"}}
    refused(anthropic.BadRequestError, output_config={"format": schema})


BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, 1.5, True, "5", 10**400, None],
    "temperature": [-0.1, 10**400, True, "1"],
    "top_p": [0, -1, 1.5, True],
    "top_k": [-2, 1.5, True],
    "stop_sequences": [[""], ["x"] * 65, ["x" * 1025], "x", [1]],
    "stream": [1, "yes"],
    "messages": [[], "Hi", [{"role": "user"}], [{"role": "wizard", "content": "x"}], HELLO * 4097, None],
    "system": [7, [{"type": "image"}]],
    "tools": [[{"name": "a b", "input_schema": {}}], [{"name": "f"}], [TIME, TIME], [TIME] * 257],
    "tool_choice": ["any", {"type": "any"}, {"type": "tool"}, {"type": "tool", "name": "nobody"}, {"type": "maybe"}],
    "thinking": [True, {"type": "sometimes"}],
    "chat_template": ["{{ 1 }}"],
    "temprature": [1],
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_bodies_that_are_refused(server: Running, path: str) -> None:
    common = {"model", "messages", "system", "tools", "tool_choice", "thinking", "chat_template", "temprature"}
    headers = {"x-api-key": KEY, "content-type": "application/json"}

    def check(answer: Any, status: int, kind: str = "invalid_request_error") -> dict[str, Any]:
        assert answer.status_code == status, answer.text
        body = answer.json()
        assert body["type"] == "error" and body["error"]["type"] == kind
        assert body["request_id"] == answer.headers["request-id"]
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return dict(body["error"])

    with httpx.Client(base_url=server.url, headers=headers, timeout=QUICK) as client:
        good = body() if path == "/v1/messages" else {"model": NAME, "messages": HELLO}
        assert client.post(path, json=good).status_code == 200
        for name, values in BAD.items():
            if path == "/v1/messages" or name in common:
                for value in values:
                    found = check(client.post(path, content=json.dumps(good | {name: value})), 400)
                    assert found["param"] is not None and found["param"].startswith(name), (name, value, found)
        for content in (b"", b"{", b"[]", b'{"a": NaN}', b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"[" * 100_000):
            assert check(client.post(path, content=content), 400)["code"] == "invalid_json"
        check(client.post(path, content=b"{}", headers={"content-type": "text/plain"}), 415)
        check(client.get(path), 405)
        check(client.post(path, content=b" " * (MAX_BODY + 1)), 413, "request_too_large")


def test_who_leaves_is_forgotten(client: Any, server: Running) -> None:
    with client.messages.stream(**ask(max_tokens=900)) as stream:
        for event in stream:
            if event.type == "text":
                break
    server.until_idle()


def test_many_at_once_are_each_right(server: Running) -> None:
    async def all_of_them() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key=KEY, timeout=QUICK) as client:

            async def one(number: int) -> str:
                messages = [{"role": "user", "content": "x" * number}]
                async with client.messages.stream(**ask(messages=messages, max_tokens=20 + number)) as stream:
                    return "".join([text async for text in stream.text_stream])

            return list(await asyncio.gather(*map(one, range(12))))

    assert asyncio.run(all_of_them()) == [(CYCLE * 3)[: 20 + number] for number in range(12)]


def test_an_engine_that_ends_in_mid_stream(speaker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP_SECONDS", "0.03")
    make_engine, engine = "tests.server.faulty_engine:make_engine", {"max_num_seqs": 4, "num_pages": 300}
    with running(speaker, make_engine=make_engine, engine=engine) as server:
        with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=QUICK, max_retries=0) as client:
            events = client.messages.create(**ask(max_tokens=1900), stream=True)
            assert next(events).type == "message_start"
            os.kill(server.engine.pid, signal.SIGKILL)
            with pytest.raises(anthropic.APIStatusError) as caught:
                list(events)
            error = caught.value.body["error"]
            assert (error["type"], error["code"]) == ("overloaded_error", "server_dead")
            assert caught.value.body["request_id"] == caught.value.request_id
        assert server.process.wait(QUICK) == 1
