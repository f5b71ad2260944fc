"""Streams of a slow engine: they begin before their first token, and are never silent for long."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.server.serving import NAME, QUICK, Running, running

STEP = 1.0  # seconds: the first token takes at least one step
SETTINGS: dict[str, Any] = {"begin_timeout": 0.1, "ping_timeout": 0.2}
GREEDY = {"temperature": 0}
HELLO: Any = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": NAME, "messages": HELLO, "max_tokens": 2, "stream": True, **GREEDY}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEP_SECONDS", str(STEP))
        make_engine, engine = "tests.server.faulty_engine:make_engine", {"max_num_seqs": 4, "num_pages": 300}
        with running(model, make_engine=make_engine, engine=engine, **SETTINGS) as server:
            yield server


def read(server: Running, path: str) -> tuple[float, list[tuple[float, str]]]:
    """When the headers came, and each line: seconds since the request."""
    began = time.monotonic()
    with httpx.stream("POST", server.url + path, json=BODY, timeout=QUICK) as answer:
        assert answer.status_code == 200, answer.read()
        headers = time.monotonic() - began
        return headers, [(time.monotonic() - began, line) for line in answer.iter_lines() if line]


def test_comments_come_before_the_first_token(server: Running) -> None:
    headers, lines = read(server, "/v1/chat/completions")
    first = next(number for number, (_, line) in enumerate(lines) if line != ": ping")
    came, line = lines[first]
    assert headers < came - STEP / 2 and lines[0][0] < came - STEP / 2 and first >= 2
    # Clients take the first choice for the first token, so the role comes with it.
    delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
    assert delta["role"] == "assistant" and lines[-1][1] == "data: [DONE]"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=QUICK) as client:
        chunks = list(client.chat.completions.create(**BODY))
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_anthropics_events_come_before_the_first_token(server: Running) -> None:
    headers, lines = read(server, "/v1/messages")
    names = [(when, line.removeprefix("event: ")) for when, line in lines if line.startswith("event: ")]
    first = next(when for when, name in names if name.startswith("content_block"))
    assert headers < first - STEP / 2 and names[0][1] == "message_start" and names[0][0] < first - STEP / 2
    assert [name for _, name in names].count("message_start") == 1
    assert [name for _, name in names[1:3]] == ["ping", "ping"] and names[-1][1] == "message_stop"
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=QUICK) as client:
        with client.messages.stream(model=NAME, messages=HELLO, max_tokens=2, extra_body=GREEDY) as stream:
            message = stream.get_final_message()
    assert message.usage.output_tokens == 2 and message.stop_reason == "max_tokens"


def test_what_is_refused_has_its_status(server: Running) -> None:
    """Also what the engine itself refuses, which compiles a grammar first."""
    wrong: list[dict[str, Any]] = [{"guided_regex": "("}, {"temperature": -1}, {"messages": HELLO * 2000}]
    for fields in wrong:
        answer = server.post("/v1/chat/completions", BODY | fields)
        assert answer.status_code == 400, answer.text


def test_a_fault_after_the_beginning_is_an_event(server: Running) -> None:
    """The last test of this server: its engine ends."""
    body = BODY | {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000}
    with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, timeout=QUICK) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": ping"
        server.engine.kill()
        (event,) = [line for line in lines if line.startswith("data: ")]
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "server_dead"
