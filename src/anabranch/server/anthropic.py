"""Anthropic's dialect of a chat: its bodies become the core's, the core's parts its messages and events. No HTTP here.

Two things differ from what the names suggest. A thought is shown only to those who ask for thinking, because clients
that do not ask take the first block for the answer. And a call's input is sent when it is complete: clients parse it as
it comes and give up on broken JSON, which a model may write. Such arguments, and those that were cut off, are given as
{"arguments": "the text"}, so that no tool runs on half of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from anabranch.server import protocol
from anabranch.server.errors import ApiError, bad_request
from anabranch.server.parsers.json_calls import strict_json
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import MAX_MESSAGES, MAX_TOOLS, Body, ChatCompletion, Name, StopTexts

Event = dict[str, Any]

ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
ERRORS |= {408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
TOO_LONG = "prompt is too long"  # clients look for these words before they shorten a conversation


# Bodies.


class Block(Body, kw_only=True):
    """A piece of content: text, a thought, a call or its result."""

    KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    OTHER_KINDS = "cannot be read here: this model takes text"

    type: Name
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    signature: Any = None  # no effect, as all that follow
    data: Any = None
    citations: Any = None
    cache_control: Any = None
    caller: Any = None
    toolset_name: Any = None


Blocks = Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]


class Message(Body, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Tool(Body, kw_only=True):
    KINDS = ("custom",)
    OTHER_KINDS = "is a tool of Anthropic's servers, which does not run here"

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]
    type: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None  # no effect, as all that follow
    input_examples: Any = None
    cache_control: Any = None
    allowed_callers: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None


class ToolChoice(Body, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(Body, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None  # no effect
    display: Literal["summarized", "omitted"] | None = None
    block_binding: Any = None  # no effect


class OutputFormat(Body, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Body, kw_only=True):
    format: OutputFormat | None = None
    effort: Name | None = None
    task_budget: Any = None  # no effect


class CountTokens(Body, kw_only=True):
    model: Name | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None

    cache_control: dict[str, Any] | None = None  # no effect, as all that follow: prefixes are always cached
    context_management: dict[str, Any] | None = None
    speed: Name | None = None


class Messages(CountTokens, kw_only=True):
    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: StopTexts | None = None

    metadata: dict[str, Any] | None = None  # no effect, as all that follow
    service_tier: Name | None = None
    inference_geo: Name | None = None
    diagnostics: dict[str, Any] | None = None


def chat_completion(body: CountTokens) -> ChatCompletion:
    """The same request as the core knows it; 400 for what it cannot do."""
    messages = [] if body.system is None else [_message("system", _text(body.system, "system"))]
    for number, message in enumerate(body.messages):
        messages += _read_message(message, f"messages[{number}].content")
    if body.messages[-1].role == "assistant":
        raise bad_request("messages: the last one is the assistant's, and answers cannot be continued", "messages")
    choice = body.tool_choice or ToolChoice(type="auto" if body.tools else "none")
    request = ChatCompletion(
        model=body.model,
        messages=messages,
        tools=[_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or [])] or None,
        tool_choice=_read_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        chat_template_kwargs=_template_options(body),
        include_reasoning=shows_thinking(body),
    )
    if body.output_config is not None:
        request.reasoning_effort = body.output_config.effort
        if (wanted := body.output_config.format) is not None:
            schema = protocol.JsonSchema(schema=wanted.schema)
            request.response_format = protocol.ResponseFormat(type="json_schema", json_schema=schema)
    if isinstance(body, Messages):
        request.max_tokens, request.stream, request.stop = body.max_tokens, body.stream, body.stop_sequences or None
        request.temperature, request.top_p, request.top_k = body.temperature, body.top_p, body.top_k
    return request


def shows_thinking(body: CountTokens) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled" and body.thinking.display != "omitted"


def _template_options(body: CountTokens) -> dict[str, Any]:
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    return {"enable_thinking": thinks}  # the name that most templates use


def _read_choice(choice: ToolChoice) -> protocol.ToolChoice:
    match choice:
        case ToolChoice(type="tool", name=str(name)):
            return protocol.NamedTool(type="function", function=protocol.NamedFunction(name=name))
        case ToolChoice(type="tool"):
            raise bad_request("tool_choice of type 'tool' needs the tool's name", "tool_choice.name")
        case ToolChoice(type="any"):
            return "required"
        case ToolChoice(type="none"):
            return "none"
    return "auto"


def _read_tool(tool: Tool, param: str) -> protocol.Tool:
    if tool.type not in (None, "custom"):
        raise bad_request(f"{param}: {tool.type!r} {Tool.OTHER_KINDS}", param)
    if tool.input_schema is None:
        raise bad_request(f"{param}: input_schema is missing", f"{param}.input_schema")
    function = protocol.ToolFunction(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return protocol.Tool(type="function", function=function)


def _read_message(message: Message, param: str) -> list[protocol.Message]:
    """Results of tools are blocks of a user's message there, and messages of their own here."""
    if isinstance(message.content, str) or message.role == "system":
        return [_message(message.role, _text(message.content, param))]
    if message.role == "assistant":
        return [_read_answer(message.content, param)]
    messages: list[protocol.Message] = []
    texts: list[str] = []

    def say() -> None:
        if texts:
            messages.append(_message("user", "\n".join(texts)))
            texts.clear()

    for number, block in enumerate(message.content):
        place = f"{param}[{number}]"
        if block.type == "tool_result":
            say()
            messages.append(_read_result(block, place))
        else:
            texts.append(_text([block], place))
    say()
    return messages or [_message("user", "")]


def _read_result(block: Block, param: str) -> protocol.Message:
    text = _text(block.content or "", f"{param}.content")
    if block.is_error:  # templates have no other place for it
        text = f"Error: {text}"
    if block.tool_use_id is None:
        raise bad_request(f"{param}: tool_use_id is missing", f"{param}.tool_use_id")
    return protocol.Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _read_answer(blocks: list[Block], param: str) -> protocol.Message:
    texts, thoughts, calls = list[str](), list[str](), list[protocol.ToolCall]()
    for number, block in enumerate(blocks):
        match block:
            case Block(type="tool_use", id=str(id), name=str(name), input=dict(arguments)):
                function = protocol.FunctionCall(name=name, arguments=arguments)
                calls.append(protocol.ToolCall(function=function, id=id))
            case Block(type="tool_use"):
                raise bad_request(f"{param}[{number}]: a tool_use has an id, a name and an input", f"{param}[{number}]")
            case Block(type="thinking", thinking=str(thought)):
                thoughts.append(thought)
            case Block(type="redacted_thinking"):
                pass  # nobody here can read it
            case _:
                texts.append(_text([block], f"{param}[{number}]"))
    said = _message("assistant", "\n".join(texts))
    said.reasoning_content = "\n".join(thoughts) or None
    said.tool_calls = calls or None
    return said


def _message(role: str, text: str) -> protocol.Message:
    return protocol.Message(role=role, content=text)


def _text(content: str | list[Block], param: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise bad_request(f"{param}: {block.type!r} {Block.OTHER_KINDS}", param)
    return "\n".join(block.text or "" for block in content)


# Answers.


class Reply:
    """One answer as events, and the message that they add up to."""

    def __init__(self, id: str, model: str, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._arguments: list[str] = []
        """Of the call that is open."""
        self._open = False
        """The last block may still grow."""
        self.message: dict[str, Any] = {"id": id, "type": "message", "role": "assistant", "model": model, "content": []}
        self.message |= {"stop_reason": None, "stop_sequence": None, "usage": usage(0, 0, 0)}

    def start(self, num_prompt: int, num_cached: int = 0) -> Event:
        self.message["usage"] = usage(num_prompt, num_cached, 0)
        return {"type": "message_start", "message": {**self.message, "content": []}}

    def feed(self, parts: Iterable[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text):
                    events += self._enter("text", {"text": ""})
                    events.append(self._grow("text", text))
                case Reasoning(text) if self._shows_thinking:
                    events += self._enter("thinking", {"thinking": "", "signature": ""})
                    events.append(self._grow("thinking", text))
                case ToolCallBegin(_, id, name):
                    events += self._close()
                    events += self._enter("tool_use", {"id": id, "name": name, "input": {}})
                case ToolCallArguments(_, text):
                    self._arguments.append(text)
        return events

    def finish(
        self, reason: str, stop: str | int | None, num_prompt: int, num_cached: int, num_new: int
    ) -> list[Event]:
        """`reason` and `stop`: the completion's finish_reason and stop_reason."""
        events = self._close()
        calls = any(block["type"] == "tool_use" for block in self.message["content"])
        by_text = isinstance(stop, str)
        why = (
            "max_tokens" if reason == "length" else "tool_use" if calls else "stop_sequence" if by_text else "end_turn"
        )
        self.message["stop_reason"] = why
        self.message["stop_sequence"] = stop if why == "stop_sequence" else None
        self.message["usage"] = usage(num_prompt, num_cached, num_new)
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": self.message["usage"]},
            {"type": "message_stop"},
        ]

    def _enter(self, kind: str, empty: dict[str, Any]) -> list[Event]:
        """The last block if it is of this kind, or a new one."""
        blocks = self.message["content"]
        if self._open and blocks[-1]["type"] == kind:
            return []
        events = self._close()
        blocks.append({"type": kind, **empty})
        self._open = True
        return [*events, self._event("content_block_start", content_block={"type": kind, **empty})]

    def _grow(self, kind: str, text: str) -> Event:
        self.message["content"][-1][kind] += text
        return self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        block, events = self.message["content"][-1], list[Event]()
        if block["type"] == "tool_use":
            block["input"] = _input("".join(self._arguments))
            self._arguments.clear()
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            events.append(self._event("content_block_delta", delta=delta))
        elif block["type"] == "thinking":  # real ones are signed, and clients wait for it
            events.append(self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""}))
        return [*events, self._event("content_block_stop")]

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self.message["content"]) - 1, **fields}


def usage(num_prompt: int, num_cached: int, num_new: int) -> dict[str, int]:
    """Tokens of the prompt are counted as read from the cache or not, never both."""
    read = {"input_tokens": num_prompt - num_cached, "cache_read_input_tokens": num_cached}
    return {**read, "cache_creation_input_tokens": 0, "output_tokens": num_new}


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """What an error is there, with the fields of the envelope that all routes share."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    told = {**error.body()["error"], "type": kind}
    if error.code == "context_length_exceeded":
        told["message"] = f"{TOO_LONG}: {error.message}"
    return {"type": "error", "error": told, "request_id": request_id}


def encode(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = strict_json(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
