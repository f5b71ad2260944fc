"""Anthropic's dialect: routes, bodies → ChatCompletions, parts of an answer → messages and events.

Two things are not obvious. A thought is shown only to clients that ask for thinking, because others take the first
block for the answer. And a call's input is sent when it is complete: clients parse it as it comes and fail on broken
JSON, which a model may write. Such arguments, and those that were cut off, are given as {"arguments": "the text"}, so
that no tool runs with incomplete ones.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from anabranch.server import errors, protocol, stream
from anabranch.server.body import read_json
from anabranch.server.chat import Chat, render
from anabranch.server.errors import ApiError, bad_request
from anabranch.server.openai_answer import ChatAnswer
from anabranch.server.parsers.json_calls import strict_json
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import MAX_MESSAGES, MAX_TOOLS, ChatCompletion, Name, StopTexts, StrictObject
from anabranch.server.service import Service
from anabranch.server.stream import json_response

router = APIRouter()
Event = dict[str, Any]

ERROR_TYPES = errors.TYPES | {413: "request_too_large", 503: "overloaded_error"}
TOO_LONG = "prompt is too long"  # clients look for these words before they shorten a conversation


class Block(StrictObject, kw_only=True):
    """A piece of content: text, a thought, a call or its result."""

    TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    OTHER_TYPES = "cannot be read here: this model takes text"

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


class AnthropicMessage(StrictObject, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class AnthropicTool(StrictObject, kw_only=True):
    TYPES = ("custom",)
    OTHER_TYPES = "is a tool of Anthropic's servers, which does not run here"

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


class AnthropicToolChoice(StrictObject, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class ThinkingConfig(StrictObject, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None  # no effect
    display: Literal["summarized", "omitted"] | None = None
    block_binding: Any = None  # no effect


class OutputFormat(StrictObject, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(StrictObject, kw_only=True):
    format: OutputFormat | None = None
    effort: Name | None = None
    task_budget: Any = None  # no effect


class CountTokens(StrictObject, kw_only=True):
    model: Name | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
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


BODIES: dict[str, type[msgspec.Struct]] = {"/v1/messages": Messages, "/v1/messages/count_tokens": CountTokens}


@router.post("/v1/messages", summary="Answer a conversation, in Anthropic's dialect")
async def messages(request: Request) -> Response:
    body = await read_json(request, Messages)
    service: Service = request.app.state.service
    service.check_ready()
    service.check_model(body.model)
    log, num_bytes = request.state.log, request.state.num_bytes
    log["stream"] = body.stream
    chat = ChatAnswer(service, await service.run(lambda: chat_completion(body), num_bytes), log, num_bytes)
    reply = Reply(f"msg_{uuid4().hex}", service.names[0], shows_thinking(body))

    async def whole() -> dict[str, Any]:
        async for _ in generate(chat, reply):
            pass
        return reply.message

    def on_error(error: ApiError) -> bytes:
        return encode(error_body(error, request.state.request_id))

    if not body.stream:
        return await stream.whole(request, whole())
    return await stream.events(request, generate(chat, reply), last=b"", on_error=on_error)


@router.post("/v1/messages/count_tokens", summary="The number of tokens of a conversation, in Anthropic's dialect")
async def count_tokens(request: Request) -> Response:
    body = await read_json(request, CountTokens)
    service: Service = request.app.state.service
    service.check_model(body.model)

    def work() -> int:
        chat = Chat(chat_completion(body))
        chat.check()
        rendered = render(service.model, chat)
        return len(service.encode(rendered.text, False, "messages", rendered.plain, counting=True))

    return json_response({"input_tokens": await service.prepare(work, "messages", request.state.num_bytes)})


async def generate(chat: ChatAnswer, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The events of an answer; `reply` grows to the whole message."""
    service, begun = chat.service, False
    with service.admitted(1):
        await chat.prepare()
        output = chat.answers[0].output
        async with aclosing(service.generate(chat.answers)) as generated:
            async for _, delta in generated:
                # The first event comes with the first token: what fails before it is an answer with a status.
                some = [] if begun else [reply.start(len(output.prompt_ids), output.num_cached)]
                begun = True
                some += reply.feed(chat.parts(delta))
                if some:  # text may be held back, for part of a character or of a tag
                    yield b"".join(map(encode, some))
    chat.log_usage()
    (completion,) = output.completions
    assert completion.finish_reason is not None
    counts = len(output.prompt_ids), output.num_cached, len(completion.token_ids)
    yield b"".join(map(encode, reply.finish(completion.finish_reason, completion.stop_reason, *counts)))


def chat_completion(body: CountTokens) -> ChatCompletion:
    """The same request in OpenAI's dialect; 400 for what that cannot express."""
    messages = [] if body.system is None else [_message("system", _text(body.system, "system"))]
    for number, message in enumerate(body.messages):
        messages += _read_message(message, f"messages[{number}].content")
    if body.messages[-1].role == "assistant":
        raise bad_request("messages: the last one is the assistant's, and answers cannot be continued", "messages")
    choice = body.tool_choice or AnthropicToolChoice(type="auto" if body.tools else "none")
    request = ChatCompletion(
        model=body.model,
        messages=messages,
        tools=[_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or [])] or None,
        tool_choice=_read_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        chat_template_kwargs={"enable_thinking": _thinks(body)},  # the name that most templates use
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


def _thinks(body: CountTokens) -> bool:
    return body.thinking is not None and body.thinking.type != "disabled"


def shows_thinking(body: CountTokens) -> bool:
    return _thinks(body) and body.thinking is not None and body.thinking.display != "omitted"


def _read_choice(choice: AnthropicToolChoice) -> protocol.ToolChoiceField:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice of type 'tool' needs the tool's name", "tool_choice.name")
        return protocol.NamedTool(type="function", function=protocol.NamedFunction(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def _read_tool(tool: AnthropicTool, param: str) -> protocol.Tool:
    if tool.type not in (None, *AnthropicTool.TYPES):
        raise bad_request(f"{param}: {tool.type!r} {AnthropicTool.OTHER_TYPES}", param)
    if tool.input_schema is None:
        raise bad_request(f"{param}: input_schema is missing", f"{param}.input_schema")
    function = protocol.ToolFunction(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return protocol.Tool(type="function", function=function)


def _read_message(message: AnthropicMessage, param: str) -> list[protocol.Message]:
    """In Anthropic's dialect results of tools are blocks of a user's message, in OpenAI's they are messages."""
    if isinstance(message.content, str) or message.role == "system":
        return [_message(message.role, _text(message.content, param))]
    if message.role == "assistant":
        return [_read_answer(message.content, param)]
    messages: list[protocol.Message] = []
    texts: list[str] = []
    for number, block in enumerate(message.content):
        place = f"{param}[{number}]"
        if block.type != "tool_result":
            texts.append(_text([block], place))
            continue
        if texts:
            messages.append(_message("user", "\n".join(texts)))
            texts = []
        messages.append(_read_result(block, place))
    if texts or not messages:
        messages.append(_message("user", "\n".join(texts)))
    return messages


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
                pass  # encrypted
            case _:
                texts.append(_text([block], f"{param}[{number}]"))
    message = _message("assistant", "\n".join(texts))
    message.reasoning_content, message.tool_calls = "\n".join(thoughts) or None, calls or None
    return message


def _message(role: str, text: str) -> protocol.Message:
    return protocol.Message(role=role, content=text)


def _text(content: str | list[Block], param: str) -> str:
    if isinstance(content, str):
        return content
    for block in content:
        if block.type != "text" or block.text is None:
            raise bad_request(f"{param}: {block.type!r} {Block.OTHER_TYPES}", param)
    return "\n".join(block.text or "" for block in content)


class Reply:
    """One answer as events, and the message that they add up to."""

    def __init__(self, id: str, model: str, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._arguments: list[str] = []
        """Of the call that the last block is."""
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
        other = "stop_sequence" if isinstance(stop, str) else "end_turn"
        why = "max_tokens" if reason == "length" else "tool_use" if calls else other
        self.message["stop_reason"] = why
        self.message["stop_sequence"] = stop if why == "stop_sequence" else None
        self.message["usage"] = usage(num_prompt, num_cached, num_new)
        delta = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": self.message["usage"]},
            {"type": "message_stop"},
        ]

    def _enter(self, type: str, empty: dict[str, Any]) -> list[Event]:
        """Go on with the last block if it has this type, or begin a new one."""
        blocks = self.message["content"]
        if self._open and blocks[-1]["type"] == type:
            return []
        events = self._close()
        blocks.append({"type": type, **empty})
        self._open = True
        return [*events, self._event("content_block_start", content_block={"type": type, **empty})]

    def _grow(self, type: str, text: str) -> Event:
        self.message["content"][-1][type] += text
        return self._event("content_block_delta", delta={"type": f"{type}_delta", type: text})

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
        elif block["type"] == "thinking":  # Anthropic signs thoughts, and clients wait for the signature
            events.append(self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""}))
        return [*events, self._event("content_block_stop")]

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "index": len(self.message["content"]) - 1, **fields}


def usage(num_prompt: int, num_cached: int, num_new: int) -> dict[str, int]:
    """Each token of the prompt counts either as read from the cache or as input."""
    read = {"input_tokens": num_prompt - num_cached, "cache_read_input_tokens": num_cached}
    return {**read, "cache_creation_input_tokens": 0, "output_tokens": num_new}


def error_body(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """An error in Anthropic's form, with the fields that errors of all routes have."""
    name = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    fields = {**error.body()["error"], "type": name}
    if error.code == "context_length_exceeded":
        fields["message"] = f"{TOO_LONG}: {error.message}"
    return {"type": "error", "error": fields, "request_id": request_id}


def encode(event: Event) -> bytes:
    return b"event: " + event["type"].encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _input(arguments: str) -> dict[str, Any]:
    try:
        value = strict_json(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
