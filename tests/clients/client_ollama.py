"""Ollama's Python client. Its dialect has no way to say that a tool must be called."""

from __future__ import annotations

import json
from typing import Any

import ollama

from tests.clients import harness
from tests.clients.harness import EXPECTED, MODEL, NUM_PROMPT_TOKENS, NUM_TOKENS, PROMPT, SCHEMA, TOOL, URL

client = ollama.Client(host=URL)
USER = {"role": "user", "content": PROMPT}


def ask(content: str = PROMPT, num_predict: int = NUM_TOKENS, model: str = MODEL, **options: Any) -> Any:
    messages = options.pop("messages", [{"role": "user", "content": content}])
    return client.chat(
        model=model, messages=messages, options={"temperature": 0, "num_predict": num_predict}, **options
    )


def chat() -> None:
    answer = ask()
    assert answer.message.content == EXPECTED and answer.done_reason == "length", answer
    given = client.generate(model=MODEL, prompt=PROMPT, options={"temperature": 0, "num_predict": NUM_TOKENS})
    assert given.response == EXPECTED, given
    assert client.list().models[0].model == MODEL and client.ps().models[0].model == MODEL
    assert "completion" in client.show(MODEL).capabilities


def stream() -> None:
    pieces = [part.message.content for part in ask(stream=True)]
    assert "".join(pieces) == EXPECTED and len(pieces) > 3, pieces


def tools() -> None:
    tools = [{"type": "function", "function": TOOL}]
    assert ask(tools=tools, num_predict=8).message.content
    called = ollama.Message.ToolCall.Function(name="get_weather", arguments={"city": "Oslo"})
    message = ollama.Message(role="assistant", tool_calls=[ollama.Message.ToolCall(function=called)])
    result = {"role": "tool", "content": "rain", "tool_name": "get_weather"}
    assert ask(messages=[USER, message, result], tools=tools, num_predict=8).message.content


def structured() -> None:
    harness.check_person(**json.loads(ask(format=SCHEMA, num_predict=harness.SCHEMA_TOKENS).message.content))


def errors() -> None:
    error = harness.refused(lambda: ask(model="no-such-model"), ollama.ResponseError)
    assert isinstance(error, ollama.ResponseError) and error.status_code == 404, error
    error = harness.refused(lambda: ask(harness.LONG), ollama.ResponseError)
    assert "maximum context length" in str(error), error


def abort() -> None:
    def leave() -> None:
        options = {"temperature": 0, "num_predict": harness.MANY_TOKENS}
        parts = ollama.Client(host=harness.ENDLESS).chat(model=MODEL, messages=[USER], options=options, stream=True)
        next(parts)
        parts.close()

    harness.check_abort(leave)


def usage() -> None:
    answer = ask()
    assert (answer.prompt_eval_count, answer.eval_count) == (NUM_PROMPT_TOKENS, NUM_TOKENS), answer


harness.run("ollama", {"ollama (Python)": harness.named(chat, stream, tools, structured, errors, abort, usage)})
