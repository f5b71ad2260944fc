"""litellm, in three of the dialects that the server speaks."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one

import litellm

from tests.clients.harness import (
    CALL_TOKENS,
    ENDLESS,
    EXPECTED,
    LONG,
    MANY_TOKENS,
    MODEL,
    NUM_PROMPT_TOKENS,
    NUM_TOKENS,
    PROMPT,
    SCHEMA,
    SCHEMA_TOKENS,
    TOOL,
    URL,
    Case,
    check_abort,
    check_call,
    check_person,
    refused,
    run,
)

FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def cases(prefix: str, path: str, forces_tools: bool) -> dict[str, Case]:
    def ask(content: str = PROMPT, **options: Any) -> Any:
        given: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "model": prefix + MODEL}
        given |= {"max_tokens": NUM_TOKENS, "temperature": 0, "num_retries": 0, "api_base": URL + path}
        return litellm.completion(**given | options, api_key="none")

    def chat() -> None:
        (choice,) = ask().choices
        assert choice.message.content == EXPECTED, choice
        assert choice.finish_reason == "length", choice

    def stream() -> None:
        chunks = list(ask(stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == EXPECTED, text
        assert len(chunks) > 5

    def tools() -> None:
        tools = [{"type": "function", "function": TOOL}]
        if forces_tools:
            options = {"tools": tools, "tool_choice": "required", "max_tokens": CALL_TOKENS, "stream": True}
            options |= {"parallel_tool_calls": False}
            message = litellm.stream_chunk_builder(list(ask(**options))).choices[0].message
            (call,) = message.tool_calls
            check_call(call.function.name, json.loads(call.function.arguments))
            message = message.model_dump()
        else:
            arguments = json.dumps({"city": "Oslo"})
            call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked = {"role": "user", "content": PROMPT}
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "rain"}
        assert ask(messages=[asked, message, result], tools=tools, max_tokens=8).choices[0].message.content

    def structured() -> None:
        text = ask(response_format=FORMAT, max_tokens=SCHEMA_TOKENS).choices[0].message.content
        check_person(**json.loads(text))

    def errors() -> None:
        def unknown() -> None:
            ask(model=f"{prefix}no-such-model")

        def too_long() -> None:
            ask(LONG)

        error = refused(unknown, litellm.NotFoundError, litellm.APIError)
        assert "no-such-model" in str(error), error
        # litellm looks for the reason in OpenAI's and Anthropic's errors, not in Ollama's
        refused(too_long, litellm.ContextWindowExceededError if forces_tools else litellm.BadRequestError)

    def abort() -> None:
        def leave() -> None:
            answer = ask(api_base=ENDLESS + path, stream=True, max_tokens=MANY_TOKENS)
            next(iter(answer))  # it has no close

        check_abort(leave)

    def usage() -> None:
        found = ask().usage
        assert (found.prompt_tokens, found.completion_tokens) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found
        found = list(ask(stream=True, stream_options={"include_usage": True}))[-1].usage
        assert (found.prompt_tokens, found.completion_tokens) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found

    ran = [chat, stream, tools, structured, errors, abort, usage]
    return {case.__name__: case for case in ran}


run(
    "litellm",
    {
        "litellm `openai/`": cases("openai/", "/v1", True),
        "litellm `anthropic/`": cases("anthropic/", "", True),
        "litellm `ollama_chat/`": cases("ollama_chat/", "", False),
    },
)
