"""Anthropic's dialect: routes, bodies → ChatCompletions, parts of an answer → messages and events.

Two things are not obvious. A thought is shown only to clients that ask for thinking, because others take the first
block for the answer. And a call's input is sent when it is complete: clients parse it as it comes and fail on broken
JSON, which a model may write. Such arguments, and those that were cut off, are given as {"arguments": "the text"}, so
that no tool runs with incomplete ones.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable
from itertools import groupby
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from anabranch.request import RequestOutput
from anabranch.server import protocol, stream
from anabranch.server.body import read_json
from anabranch.server.chat import Chat, render
from anabranch.server.errors import bad_request
from anabranch.server.openai import ChatAnswer
from anabranch.server.parsers.json_calls import strict_json
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import Body, ChatCompletion, JsonObject, Message, Name, StrictObject, ignoring, only
from anabranch.server.stream import json_response

router = APIRouter()
Event = dict[str, Any]


@ignoring("signature", "data", "citations", "cache_control", "caller", "toolset_name")
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


Blocks = Annotated[list[Block], Meta(max_length=protocol.MAX_MESSAGES)]


class AnthropicMessage(StrictObject, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


@ignoring("input_examples", "cache_control", "allowed_callers", "defer_loading", "eager_input_streaming", strict=bool)
class AnthropicTool(StrictObject, kw_only=True):
    TYPES = ("custom",)
    OTHER_TYPES = "is a tool of Anthropic's servers, which does not run here"

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]
    type: Name | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicToolChoice(StrictObject, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


@ignoring("block_binding", budget_tokens=int)
class ThinkingConfig(StrictObject, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictObject, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


@ignoring("task_budget")
class OutputConfig(StrictObject, kw_only=True):
    format: OutputFormat | None = None
    effort: Name | None = None


@ignoring(cache_control=JsonObject, context_management=JsonObject, speed=Name)  # prefixes are always cached
@ignoring(user_profile_id=Name, workspace_id=Name)
@only(mcp_servers=([], "MCP servers are not asked; call their tools in the client"))
class CountTokens(Body, kw_only=True):
    OTHER_FIELDS = {
        "betas": "betas are named in the header anthropic-beta",
        "compaction": "conversations are not summarised here; ask for a summary in a message",
        "container": "containers of Anthropic's servers are not here",
        "thread": "conversations are not kept; send all messages",
    }
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=protocol.MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=protocol.MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None


@ignoring("fallbacks", fallback_credit_token=Name)  # where a model of theirs refuses to answer
@ignoring(metadata=JsonObject, diagnostics=JsonObject, service_tier=Name, inference_geo=Name)
class Messages(CountTokens, kw_only=True):
    max_tokens: int
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: protocol.StopTexts | None = None


BODIES: dict[str, type[Body]] = {"/v1/messages": Messages, "/v1/messages/count_tokens": CountTokens}


@router.post("/v1/messages", summary="Answer a conversation, in Anthropic's dialect")
async def messages(request: Request) -> Response:
    service, body = await read_json(request, Messages, ready=True)
    request.state.log["stream"] = body.stream
    chat = ChatAnswer(request, await service.run(lambda: chat_completion(body), request.state.num_bytes))
    reply = Reply(f"msg_{uuid4().hex}", service.names[0], chat.body.include_reasoning)
    if body.stream:

        def idle() -> bytes:
            return b"".join(map(stream.event, reply.start(chat.answers[0].output) or [{"type": "ping"}]))

        return stream.EventStream(generate(chat, reply), chat.accepted, service.settings.ping_timeout, idle)
    return await stream.collected(request, generate(chat, reply), lambda: reply.message)


@router.post("/v1/messages/count_tokens", summary="The number of tokens of a conversation, in Anthropic's dialect")
async def count_tokens(request: Request) -> Response:
    service, body = await read_json(request, CountTokens)

    def work() -> int:
        chat = Chat(chat_completion(body))
        chat.check()
        return len(service.encode(render(service.model, chat), False, "messages", counting=True))

    return json_response({"input_tokens": await service.prepare(work, "messages", request.state.num_bytes)})


async def generate(chat: ChatAnswer, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The events of an answer; `reply` grows to the whole message."""
    async with chat.deltas() as deltas:
        output = chat.answers[0].output
        async for _, delta in deltas:
            some = [*reply.start(output), *reply.feed(chat.parts(delta))]
            if some:  # text may be held back, for part of a character or of a tag
                yield b"".join(map(stream.event, some))
    yield b"".join(map(stream.event, reply.finish(output)))


def chat_completion(body: CountTokens) -> ChatCompletion:
    """The same request in OpenAI's dialect; 400 for what that cannot express."""
    messages = [] if body.system is None else [Message(role="system", content=_text(body.system, "system"))]
    for number, message in enumerate(body.messages):
        messages += _read_message(message, f"messages[{number}].content")
    choice = body.tool_choice or AnthropicToolChoice(type="auto" if body.tools else "none")
    thinking = None if body.thinking is None or body.thinking.type == "disabled" else body.thinking
    request = ChatCompletion(
        model=body.model,
        messages=messages,
        tools=[_read_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or [])] or None,
        tool_choice=_read_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        chat_template_kwargs={"enable_thinking": thinking is not None},  # the name that most templates use
        include_reasoning=thinking is not None and thinking.display != "omitted",
        continue_final_message=body.messages[-1].role == "assistant",
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


def _read_message(message: AnthropicMessage, param: str) -> list[Message]:
    """In Anthropic's dialect results of tools are blocks of a user's message, in OpenAI's they are messages."""
    if isinstance(message.content, str) or message.role == "system":
        return [Message(role=message.role, content=_text(message.content, param))]
    if message.role == "assistant":
        return [_read_answer(message.content, param)]
    messages: list[Message] = []
    blocks = ((block, f"{param}[{number}]") for number, block in enumerate(message.content))
    for is_result, some in groupby(blocks, lambda pair: pair[0].type == "tool_result"):
        if is_result:
            messages += [_read_result(*pair) for pair in some]
        else:
            messages.append(Message(role="user", content="\n".join(_text([block], place) for block, place in some)))
    return messages or [Message(role="user", content="")]


def _read_result(block: Block, param: str) -> Message:
    text = _text(block.content or "", f"{param}.content")
    if block.is_error:  # templates have no other place for it
        text = f"Error: {text}"
    if block.tool_use_id is None:
        raise bad_request(f"{param}: tool_use_id is missing", f"{param}.tool_use_id")
    return Message(role="tool", content=text, tool_call_id=block.tool_use_id)


def _read_answer(blocks: list[Block], param: str) -> Message:
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
    message = Message(role="assistant", content="\n".join(texts), tool_calls=calls or None)
    message.reasoning_content = "\n".join(thoughts) or None
    return message


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
        self.message |= {"stop_reason": None, "stop_sequence": None}

    def start(self, output: RequestOutput) -> list[Event]:
        """The first event, if it was not sent."""
        if "usage" in self.message:
            return []
        self.message["usage"] = usage(output, 0)
        return [{"type": "message_start", "message": {**self.message, "content": []}}]

    def feed(self, parts: Iterable[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text):
                    events += self._grow("text", text)
                case Reasoning(text) if self._shows_thinking:
                    events += self._grow("thinking", text, signature="")
                case ToolCallBegin(_, id, name):
                    events += self._begin("tool_use", id=id, name=name, input={})
                case ToolCallArguments(_, text):
                    self._arguments.append(text)
        return events

    def finish(self, output: RequestOutput) -> list[Event]:
        events = self._close()
        (completion,) = output.completions
        calls = any(block["type"] == "tool_use" for block in self.message["content"])
        other = "stop_sequence" if isinstance(completion.stop_reason, str) else "end_turn"
        why = "max_tokens" if completion.finish_reason == "length" else "tool_use" if calls else other
        delta = {"stop_reason": why, "stop_sequence": completion.stop_reason if why == "stop_sequence" else None}
        self.message |= {**delta, "usage": usage(output, len(completion.token_ids))}
        ending = {"type": "message_delta", "delta": delta, "usage": self.message["usage"]}
        return [*events, ending, {"type": "message_stop"}]

    def _begin(self, type: str, **fields: Any) -> list[Event]:
        """Close the last block and begin another."""
        events = self._close()
        self.message["content"].append({"type": type, **fields})
        self._open = True
        return [*events, self._event("content_block_start", content_block={"type": type, **fields})]

    def _grow(self, type: str, text: str, **fields: Any) -> list[Event]:
        """Add text to the last block if it has this type, or to a new one with these fields."""
        blocks = self.message["content"]
        events = [] if self._open and blocks[-1]["type"] == type else self._begin(type, **{type: ""}, **fields)
        blocks[-1][type] += text
        return [*events, self._event("content_block_delta", delta={"type": f"{type}_delta", type: text})]

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        block, events = self.message["content"][-1], list[Event]()
        if block["type"] == "tool_use":
            block["input"] = call_input("".join(self._arguments))
            self._arguments.clear()
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            events.append(self._event("content_block_delta", delta=delta))
        elif block["type"] == "thinking":  # Anthropic signs thoughts, and clients wait for the signature
            events.append(self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""}))
        return [*events, self._event("content_block_stop")]

    def _event(self, type: str, **fields: Any) -> Event:
        return {"type": type, "index": len(self.message["content"]) - 1, **fields}


def usage(output: RequestOutput, num_new: int) -> dict[str, int]:
    """Each token of the prompt counts either as read from the cache or as input."""
    cached = output.num_cached
    read = {"input_tokens": len(output.prompt_ids) - cached, "cache_read_input_tokens": cached}
    return {**read, "cache_creation_input_tokens": 0, "output_tokens": num_new}


def call_input(arguments: str) -> dict[str, Any]:
    try:
        value = strict_json(arguments or "{}")
        msgspec.json.encode(value)  # half of a surrogate pair cannot be sent
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
