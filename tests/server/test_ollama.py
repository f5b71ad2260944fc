"""Ollama's dialect, on a model whose every word is known beforehand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from anabranch.server.ollama import Reply
from anabranch.server.parsers.parts import Content, Reasoning, ToolCallArguments, ToolCallBegin
from tests.server.serving import NAME, Running, running
from tests.server.test_anthropic_api import CONTEXT, CYCLE, SCHEMA, write_speaker

pytestmark = pytest.mark.usefixtures("unharmed")

HELLO: list[Any] = [{"role": "user", "content": "Where does the river go?"}]
RENDERED = "<|user|>Where does the river go?\n<|assistant|>"
TEXT = (CYCLE * 3)[:30]
OPTIONS = {"temperature": 0, "num_predict": 30, "num_ctx": 4096}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    model = write_speaker(tmp_path_factory.mktemp("model") / NAME)
    flags = ("--max-num-seqs", "8", "--num-pages", "600", "--max-model-len", str(CONTEXT))
    with running(model, *flags) as server:
        yield server


def ask(server: Running, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The lines of the answer; one of them if it is no stream."""
    answer = server.post(path, {"model": f"{NAME}:latest", "options": OPTIONS, "keep_alive": "5m", **fields})
    assert answer.status_code == 200, answer.text
    kind = "application/json" if fields.get("stream") is False else "application/x-ndjson"
    assert answer.headers["content-type"].startswith(kind)
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_an_answer_and_its_stream(server: Running, path: str) -> None:
    def text(line: dict[str, Any]) -> str:
        return str(line["message"]["content"] if path == "/api/chat" else line["response"])

    asked: dict[str, Any] = {"messages": HELLO} if path == "/api/chat" else {"prompt": HELLO[0]["content"]}
    (whole,) = ask(server, path, **asked, stream=False)
    assert text(whole) == TEXT and whole["model"] == NAME and whole["done"] is True
    assert (whole["done_reason"], whole["eval_count"], whole["prompt_eval_count"]) == ("length", 30, len(RENDERED))
    assert datetime.fromisoformat(whole["created_at"]).tzinfo is not None
    assert 0 < whole["prompt_eval_duration"] <= whole["total_duration"] and whole["eval_duration"] > 0
    *lines, last = ask(server, path, **asked, options=OPTIONS | {"num_predict": 330})
    assert "".join(map(text, lines)) == (CYCLE * 30)[:330] and len(lines) > 10, "it comes as it grows"
    assert all(line["done"] is False for line in lines) and last["done"] is True and text(last) == ""
    assert last.keys() == whole.keys() and last["eval_count"] == 330


def test_prompts_that_are_raw_or_have_a_system_message(server: Running) -> None:
    (raw,) = ask(server, "/api/generate", prompt="xHu", raw=True, stream=False)
    assert raw["response"].startswith("m</think>Hum") and raw["prompt_eval_count"] == 3
    (system,) = ask(server, "/api/generate", prompt="x", system="Be brief.", stream=False)
    assert system["prompt_eval_count"] == len("<|system|>Be brief.\n<|user|>x\n<|assistant|>")


def test_thoughts(server: Running) -> None:
    (whole,) = ask(server, "/api/chat", messages=HELLO, think=True, stream=False)
    assert whole["message"]["thinking"] == "Hum" and whole["message"]["content"] == TEXT[len(CYCLE) :]
    lines = ask(server, "/api/chat", messages=HELLO, think=True)
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hum"
    (silent,) = ask(server, "/api/chat", messages=HELLO, think=False, stream=False)
    assert "thinking" not in silent["message"] and silent["message"]["content"] == TEXT


def test_formats_tools_and_prefill(server: Running) -> None:
    options = OPTIONS | {"num_predict": 200}
    (whole,) = ask(server, "/api/chat", messages=HELLO, format=SCHEMA, options=options, stream=False)
    assert json.loads(whole["message"]["content"])["city"] in ("Basel", "Bern")
    (begun,) = ask(server, "/api/chat", messages=[*HELLO, {"role": "assistant", "content": "Hu"}], stream=False)
    assert begun["message"]["content"].startswith("m</think>")
    call = {"function": {"name": "get_weather", "arguments": {"city": "Bern", "days": 1}}}
    results = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    (after,) = ask(server, "/api/chat", messages=[*HELLO, *results], tools=[WEATHER], stream=False)
    count = {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}, results[1]], "tools": [WEATHER]}
    assert after["prompt_eval_count"] == server.post("/tokenize", count).json()["count"]


def test_calls_are_sent_when_they_are_complete() -> None:
    reply = Reply("m", is_chat=True)
    begin = [ToolCallBegin(0, "a", "f"), ToolCallArguments(0, '{"x":')]
    assert reply.feed(begin, False) == []
    (line,) = reply.feed([ToolCallArguments(0, " 1}"), ToolCallBegin(1, "b", "g")], False)
    (call,) = line["message"]["tool_calls"]
    assert call["function"] == {"index": 0, "name": "f", "arguments": {"x": 1}}
    (line,) = reply.feed([ToolCallArguments(1, '{"y": tru')], True)
    assert line["message"]["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"y": tru'}
    reply.feed([Content("so"), ToolCallBegin(2, "c", "h"), ToolCallArguments(2, '{"t": "\\ud83d"}')], True)
    assert reply.calls[2]["function"]["arguments"] == {"arguments": '{"t": "\\ud83d"}'}, "half a surrogate pair"
    reply.feed([Content("so")], True)
    assert len(reply.finish("stop", 1, 1)) and len(reply.whole["message"]["tool_calls"]) == 3


def test_thoughts_that_nobody_wants_are_not_sent() -> None:
    for thinks in (True, False):
        reply = Reply("m", is_chat=True, thinks=thinks)
        assert bool(reply.feed([Reasoning("hm")], False)) == bool(reply.thought) == thinks


def test_what_is_served(server: Running) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = server.get(path).json()["models"]
        assert model["name"] == model["model"] == NAME and model["details"]["format"] == "safetensors"
    assert server.get("/api/version").json() == server.get("/version").json()
    for body in ({"model": NAME}, {"name": f"{NAME}:latest"}):
        shown = server.post("/api/show", body).json()
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == CONTEXT
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
    for path in ("/api/chat", "/api/generate"):
        loaded = server.post(path, {"model": NAME}).json()
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded"])
def test_a_body_without_its_type(server: Running, kind: str | None) -> None:
    """litellm gives none, and curl -d, as in Ollama's guide, a form's. Pages of other sites could too: refused."""
    headers, body = {"content-type": kind} if kind else {}, b'{"model": "%s"}' % NAME.encode()
    assert server.post("/api/chat", content=body, headers=headers).json()["done_reason"] == "load"
    for path, origin in (("/api/chat", {"origin": "http://evil.example"}), ("/v1/chat/completions", {})):
        assert server.post(path, content=body, headers=headers | origin).status_code == 415


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(server: Running, stream: bool) -> None:
    def error(path: str, status: int, **fields: Any) -> str:
        answer = server.post(path, {"stream": stream, **fields})
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"] and answer.headers["x-request-id"]
        return str(answer.json()["error"])

    assert "no model 'llama3'" in error("/api/chat", 404, model="llama3", messages=HELLO)
    assert "did you mean 'temperature'?" in error("/api/chat", 400, messages=HELLO, options={"temprature": 1})
    assert "takes text only" in error("/api/chat", 400, messages=[{**HELLO[0], "images": ["AA"]}])
    assert "takes text only" in error("/api/generate", 400, prompt="x", images=["AA"])
    assert "temperature" in error("/api/generate", 400, prompt="x", options={"temperature": -1})
    assert "suffix" in error("/api/generate", 400, prompt="x", suffix="y")
    assert "template" in error("/api/generate", 400, prompt="x", template="{{ 1 }}")
    assert "/api/chat" in error("/api/generate", 400, prompt="x", context=[1])
    assert "maximum context length" in error("/api/chat", 400, messages=[{**HELLO[0], "content": "x" * CONTEXT}])
    assert "'/api/pull'" in error("/api/pull", 404, model=NAME)
