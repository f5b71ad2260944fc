"""langchain-anthropic: ChatAnthropic."""

from __future__ import annotations

from typing import Any

import anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage

from tests.clients import harness
from tests.clients.harness import EXPECTED, MODEL, NUM_PROMPT_TOKENS, NUM_TOKENS, PROMPT, SCHEMA, TOOL, URL


def model(**options: Any) -> ChatAnthropic:
    given = {"model": MODEL, "base_url": URL, "api_key": "none", "temperature": 0, "max_retries": 0}
    return ChatAnthropic(**given | {"max_tokens": NUM_TOKENS} | options)


def chat() -> None:
    answer = model().invoke(PROMPT)
    assert answer.content == EXPECTED, answer
    assert answer.response_metadata["stop_reason"] == "max_tokens", answer


def joined(chunks: Any) -> AIMessageChunk:
    first, *others = chunks
    for other in others:
        first += other
    assert isinstance(first, AIMessageChunk)
    return first


def stream() -> None:
    answer = joined(model().stream(PROMPT))
    assert answer.text == EXPECTED, answer
    found = answer.usage_metadata
    assert found and (found["input_tokens"], found["output_tokens"]) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found


def tools() -> None:
    bound = model(max_tokens=harness.CALL_TOKENS).bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    answer = joined(bound.stream(PROMPT))
    (call,) = answer.tool_calls
    harness.check_call(call["name"], call["args"])
    asked = [HumanMessage(PROMPT), answer, ToolMessage("rain", tool_call_id=call["id"])]
    assert model(max_tokens=8).bind_tools([TOOL]).invoke(asked).text


def structured() -> None:
    schema = {"title": "person", **SCHEMA}
    bound = model(max_tokens=harness.SCHEMA_TOKENS).with_structured_output(schema, method="json_schema")
    harness.check_person(**bound.invoke(PROMPT))


def errors() -> None:
    harness.refused(lambda: model(model="no-such-model").invoke(PROMPT), anthropic.NotFoundError)
    error = harness.refused(lambda: model().invoke(harness.LONG), anthropic.BadRequestError)
    assert "prompt is too long" in str(error), error


def abort() -> None:
    def leave() -> None:
        answer = model(base_url=harness.ENDLESS, max_tokens=harness.MANY_TOKENS).stream(PROMPT)
        next(chunk for chunk in answer if chunk.text)
        answer.close()  # type: ignore[attr-defined]

    harness.check_abort(leave)


def usage() -> None:
    found = model().invoke(PROMPT).usage_metadata
    assert found and (found["input_tokens"], found["output_tokens"]) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found
    assert model().get_num_tokens_from_messages([HumanMessage(PROMPT)]) == NUM_PROMPT_TOKENS


harness.run(
    "langchain-anthropic", {"langchain-anthropic": harness.named(chat, stream, tools, structured, errors, abort, usage)}
)
