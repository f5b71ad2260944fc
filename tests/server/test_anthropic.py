"""Anthropic's dialect, judged by the types and the stream reader of its own client."""

import json
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent, ToolUseBlock
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from anabranch.request import Completion, RequestOutput
from anabranch.server.anthropic import Messages, Reply, chat_completion, usage
from anabranch.server.body import decode
from anabranch.server.chat import Chat
from anabranch.server.errors import ApiError
from anabranch.server.parsers.parts import Content, Named, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.stream import event as write_event

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
BODIES: TypeAdapter[Any] = TypeAdapter(MessageCreateParamsNonStreaming)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def body(**fields: Any) -> Messages:
    """A body that the client's types allow, taken as the server takes it."""
    raw = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]} | fields
    BODIES.validate_python(raw)
    return decode(json.dumps(raw).encode(), Messages)


def refused(**fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        chat_completion(body(**fields))
    assert caught.value.status == 400
    return caught.value.message


# Bodies.


def test_a_conversation() -> None:
    call = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sun"}]}
    failed = {"type": "tool_result", "tool_use_id": "call_2", "content": "no such city", "is_error": True}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    request = chat_completion(
        body(
            system=[
                {"type": "text", "text": "Be", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief"},
            ],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "Weather?"}, {"type": "text", "text": "Now."}]},
                {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, call]},
                {"role": "user", "content": [result, failed, {"type": "text", "text": "And?"}]},
                {"role": "assistant", "content": "Sun."},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "So:"}, {"type": "tool_result", "tool_use_id": "call_3"}],
                },
            ],
            tools=[{"name": "weather", "description": "Tells it", "input_schema": WEATHER, "type": "custom"}],
            tool_choice={"type": "auto"},
        )
    )
    chat = Chat(request)
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert chat.messages == [
        {"role": "system", "content": "Be\nbrief"},
        {"role": "user", "content": "Weather?\nNow."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "reasoning": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "sun", "tool_call_id": "call_1", "name": "weather"},
        {"role": "tool", "content": "Error: no such city", "tool_call_id": "call_2"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Sun."},
        {"role": "user", "content": "So:"},
        {"role": "tool", "content": "", "tool_call_id": "call_3"},
    ]
    described = {"name": "weather", "description": "Tells it", "parameters": WEATHER}
    assert chat.tools == [{"type": "function", "function": described}] and chat.tool_choice == "auto"


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "weather"}, Named("weather"), True),
        ({"type": "none"}, "none", True),
    ],
)
def test_tool_choice(choice: dict[str, Any], expected: Any, parallel: bool) -> None:
    tools = [{"name": "weather", "input_schema": WEATHER}]
    chat = Chat(chat_completion(body(tools=tools, tool_choice=choice)))
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)


def test_without_tools_or_choice() -> None:
    assert Chat(chat_completion(body())).tool_choice == "none"
    assert Chat(chat_completion(body(tools=[{"name": "f", "input_schema": {"type": "object"}}]))).tool_choice == "auto"


def test_sampling() -> None:
    schema = {"type": "json_schema", "schema": WEATHER}
    request = chat_completion(
        body(
            temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["x"], output_config={"format": schema, "effort": "low"}
        )
    )
    assert (request.temperature, request.top_p, request.top_k, request.stop) == (0.5, 0.9, 4, ["x"])
    assert (request.max_tokens, request.model, request.stream, request.reasoning_effort) == (5, "m", False, "low")
    assert request.response_format is not None and request.response_format.json_schema is not None
    assert request.response_format.json_schema.schema == WEATHER
    plain = chat_completion(body())
    assert (plain.temperature, plain.stop, plain.response_format) == (None, None, None)


@pytest.mark.parametrize(
    ("thinking", "thinks", "shows"),
    [
        (None, False, False),
        ({"type": "disabled"}, False, False),
        ({"type": "enabled", "budget_tokens": 1024}, True, True),
        ({"type": "adaptive"}, True, True),
        ({"type": "adaptive", "display": "omitted"}, True, False),
    ],
)
def test_thinking_is_asked_for(thinking: dict[str, Any] | None, thinks: bool, shows: bool) -> None:
    request = body(**({"thinking": thinking} if thinking else {}))
    assert chat_completion(request).include_reasoning == shows
    assert Chat(chat_completion(request)).template_options == {"enable_thinking": thinks}


def test_what_cannot_be_done_is_refused() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    user = {"role": "user", "content": [{"type": "text", "text": "Hi"}, image]}
    assert refused(messages=[user]) == "messages[0].content[1]: 'image' cannot be read here: this model takes text"
    result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
    assert "messages[0].content[0].content[0]: 'image'" in refused(messages=[{"role": "user", "content": [result]}])
    search = {"type": "web_search_20250305", "name": "web_search"}
    assert "tools[0]: 'web_search_20250305' is a tool of Anthropic's servers" in refused(tools=[search])
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        msgspec.json.decode('{"messages": [{"role": "user", "content": "Hi"}]}', type=Messages)


def test_half_a_call_is_refused() -> None:
    for block in (
        {"type": "tool_use", "id": "a", "name": "f"},
        {"type": "tool_result"},
        {"type": "text"},
        {"type": "thinking"},
    ):
        role = "user" if block["type"] == "tool_result" else "assistant"
        raw = {"max_tokens": 5, "messages": [{"role": role, "content": [block]}, {"role": "user", "content": "Hi"}]}
        with pytest.raises(ApiError, match=r"^messages\[0\].content\[0\]: "):
            chat_completion(msgspec.json.decode(json.dumps(raw), type=Messages))


# Answers.


def output_of(
    num_prompt: int, num_cached: int, num_new: int, reason: Any = "stop", stop: str | int | None = None
) -> RequestOutput:
    completion = Completion(index=0, text="", token_ids=[0] * num_new, finish_reason=reason, stop_reason=stop)
    return RequestOutput(
        id="1", prompt=None, prompt_ids=[0] * num_prompt, completions=[completion], num_cached=num_cached
    )


def stream(parts: list[list[Part]], reason: str = "stop", stop: str | int | None = None, shows: bool = True) -> Any:
    """The events, each as the client takes it; and the whole message, which is what the client makes of them."""
    reply, output = Reply("msg_1", "m", shows), output_of(9, 4, 7, reason, stop)
    events = reply.start(output)
    for some in parts:
        events += reply.feed(some)
    events += reply.finish(output)
    for event in events:
        EVENTS.validate_python(event, strict=True)
        assert write_event(event) == b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))
    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    whole = Message.model_validate(reply.message)
    assert snapshot.model_dump(exclude_none=True) == whole.model_dump(exclude_none=True)
    return events, whole


def test_events_in_order() -> None:
    events, message = stream(
        [
            [Reasoning("I "), Reasoning("think")],
            [Content("Let ")],
            [Content("me see."), ToolCallBegin(0, "call_a", "weather")],
            [ToolCallArguments(0, '{"city":')],
            [ToolCallArguments(0, ' "Rome"}'), ToolCallBegin(1, "call_b", "now"), ToolCallArguments(1, "{}")],
            [Content("Done.")],
        ]
    )
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        "message_start",
        *("start", "delta", "delta", "delta", "stop"),  # thinking, with its signature
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "stop"),
        "message_delta",
        "message_stop",
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1, 2, 3, 4]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["stop_reason"] is None
    assert message.content[2] == ToolUseBlock(type="tool_use", id="call_a", name="weather", input={"city": "Rome"})
    assert message.stop_reason == "tool_use" and message.content[1].text == "Let me see."
    counted = message.usage
    assert (counted.input_tokens, counted.cache_read_input_tokens, counted.output_tokens) == (5, 4, 7)


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, ("end_turn", None)),
        ("stop", 151645, ("end_turn", None)),
        ("stop", "###", ("stop_sequence", "###")),
        ("length", None, ("max_tokens", None)),
    ],
)
def test_why_it_stopped(reason: str, stop: str | int | None, expected: tuple[str, str | None]) -> None:
    _, message = stream([[Content("Hi")]], reason, stop)
    assert (message.stop_reason, message.stop_sequence) == expected
    _, message = stream([[ToolCallBegin(0, "a", "f"), ToolCallArguments(0, '{"x": 1')]], "length")
    assert message.stop_reason == "max_tokens"


def test_thoughts_are_shown_only_to_those_who_ask() -> None:
    events, message = stream([[Reasoning("hm")], [Content("Hi")]], shows=False)
    assert [block.type for block in message.content] == ["text"] and "hm" not in json.dumps(events)
    assert stream([])[1].content == []


@pytest.mark.parametrize("arguments", ['{"a": tru}', '{"a": 1', "[1]", '"x"', '{"a": NaN}', "{" * 5000])
def test_broken_arguments_reach_the_client_as_text(arguments: str) -> None:
    _, message = stream([[ToolCallBegin(0, "a", "f"), ToolCallArguments(0, arguments)]])
    assert message.content[0].input == {"arguments": arguments}


def test_a_call_without_arguments() -> None:
    assert stream([[ToolCallBegin(0, "a", "f")]])[1].content[0].input == {}


PARTS = st.one_of(
    st.text(min_size=1, max_size=5).map(Content),
    st.text(min_size=1, max_size=5).map(Reasoning),
    st.sampled_from([["{}"], ['{"a"', ": 1}"], ['{"a": "', "é}"], []]),
)


@settings(max_examples=60)
@given(st.lists(st.lists(PARTS, max_size=4), max_size=5), st.booleans())
def test_any_parts_are_a_message(pieces: list[list[Any]], shows: bool) -> None:
    """The client's own stream reader arrives at the message that is given at once."""
    num_calls, parts = 0, list[list[Part]]()
    for some in pieces:
        parts.append([])
        for part in some:
            if isinstance(part, list):
                parts[-1].append(ToolCallBegin(num_calls, f"call_{num_calls}", "f"))
                parts[-1] += [ToolCallArguments(num_calls, text) for text in part]
                num_calls += 1
            else:
                parts[-1].append(part)
    _, message = stream(parts, shows=shows)
    text = "".join(part.text for some in parts for part in some if isinstance(part, Content))
    thought = "".join(part.text for some in parts for part in some if isinstance(part, Reasoning))
    assert "".join(block.text for block in message.content if block.type == "text") == text
    assert "".join(b.thinking for b in message.content if b.type == "thinking") == (thought if shows else "")
    assert sum(block.type == "tool_use" for block in message.content) == num_calls
    assert all(a.type != b.type or a.type == "tool_use" for a, b in zip(message.content, message.content[1:]))


def test_errors_are_those_of_the_client() -> None:
    from anthropic.types.shared import ErrorResponse

    for status in (400, 401, 404, 408, 429, 500, 503):
        error = ApiError(status, "why", code="c").body("anthropic", "req_1")
        parsed = ErrorResponse.model_validate(error)
        assert parsed.error.message == "why" and error["error"]["code"] == "c" and parsed.request_id == "req_1"
    # 413's is known to the API, not to the client's types.
    for status, name in ((413, "request_too_large"), (415, "invalid_request_error"), (502, "api_error")):
        assert ApiError(status, "x", code=None).body("anthropic")["error"]["type"] == name


def test_counts() -> None:
    MessageTokensCount.model_validate({"input_tokens": 3})
    assert usage(output_of(10, 4, 2), 2) == {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": 2,
    }
