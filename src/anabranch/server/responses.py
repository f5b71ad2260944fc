"""OpenAI's Responses: routes, bodies → ChatCompletions, and the conversations that later requests continue.

A response is kept unless its request says `store: false`, so that `previous_response_id` can name it. They are kept in
this process alone and are forgotten when it ends, or when newer ones need their place. A client that keeps the items
itself, as Codex does, needs none of it. Tools that OpenAI's servers run (web search and the like) do not run here: the
model is not offered them, which is logged once for each.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from anabranch.server import protocol, stream
from anabranch.server.body import read_json
from anabranch.server.errors import ApiError, bad_request
from anabranch.server.openai import ChatAnswer
from anabranch.server.protocol import Body, ChatCompletion, JsonObject, Message, Name, StrictObject, ignoring, only
from anabranch.server.response_events import ResponseOutput
from anabranch.server.stream import json_response

log = logging.getLogger("anabranch.server")
router = APIRouter()

MAX_KEPT = 1024  # responses
MAX_KEPT_BYTES = 64 * 2**20  # of the requests and answers they stand for
MESSAGE_BYTES = 200  # of a message besides its text
HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "local_shell", "computer", "mcp")
"""Beginnings of the types of tools that OpenAI's servers or a client of theirs run."""
TEXT_TYPES = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_logged: set[str] = set()


@ignoring("annotations", "logprobs", "prompt_cache_breakpoint")
class TextPart(StrictObject, kw_only=True):
    TYPES = TEXT_TYPES
    OTHER_TYPES = "cannot be read: this model takes text only"

    type: Name
    text: str | None = None
    refusal: str | None = None


Parts = Annotated[list[TextPart], Meta(max_length=protocol.MAX_MESSAGES)]


@ignoring("id", "status", "phase", "encrypted_content", "caller", "namespace", "async")
class Item(StrictObject, kw_only=True):
    """A piece of the conversation: a message, a thought, a call or its result."""

    TYPES = ("message", "reasoning", "function_call", "function_call_output")
    OTHER_TYPES = "is an item that is not known here"

    type: Name = "message"
    role: Name | None = None
    content: str | Parts | None = None
    summary: Parts | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | Parts | None = None


@ignoring("allowed_callers", "defer_loading", "output_schema", "async")
class FunctionTool(StrictObject, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(StrictObject, kw_only=True):
    type: Literal["function"]
    name: Name


@ignoring("summary", "generate_summary", "context", "mode")
class ReasoningConfig(StrictObject, kw_only=True):
    effort: Name | None = None


class TextFormat(StrictObject, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


@ignoring("verbosity")
class TextConfig(StrictObject, kw_only=True):
    format: TextFormat | None = None


@ignoring(metadata=JsonObject, service_tier=Name, user=Name, prompt_cache_key=Name, prompt_cache_retention=Name)
@ignoring(safety_identifier=Name, prompt_cache_options=JsonObject, stream_options=JsonObject, max_tool_calls=int)
@ignoring(truncation=Literal["disabled", "auto"], include=list[Name], context_management=list[JsonObject])
@ignoring(moderation=JsonObject, client_metadata=JsonObject)
@only(background=(False, "a response is computed while its client waits"))
@only(top_logprobs=(0, "ask /v1/chat/completions for log probabilities"))
class CreateResponse(Body, kw_only=True):
    OTHER_FIELDS = {
        "access_programs": "programs of OpenAI's servers are not here",
        "conversation": "conversations are not kept; give previous_response_id, or all items in input",
        "image": "this model takes and writes text",
        "prompt": "prompt templates are not kept here; send their text in instructions or input",
    }
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=protocol.MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool = True
    stream: bool = False
    tools: Annotated[list[JsonObject], Meta(max_length=protocol.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    chat_template_kwargs: protocol.TemplateOptions | None = None


BODIES: dict[str, type[Body]] = {"/v1/responses": CreateResponse}


@dataclass
class Kept:
    response: dict[str, Any]
    messages: list[Message]
    """The conversation up to and with the response, without instructions."""
    num_bytes: int


class Responses:
    """The last responses, as many as the bounds allow."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.num_bytes = 0

    def keep(self, response: dict[str, Any], asked: list[Message], earlier: Kept, num_bytes: int) -> None:
        """The answer to `asked`, which begins with the messages of `earlier`; `num_bytes` are those of its request."""
        try:
            items = msgspec.convert(response["output"], list[Item])
        except msgspec.ValidationError as error:  # a name that no client could send back
            log.warning("response %s is not kept: %s", response["id"], error)
            return
        # Messages stay in memory as long as the last response of their conversation.
        size = earlier.num_bytes + num_bytes + len(stream.encode(response)) + MESSAGE_BYTES * len(asked)
        self.add(Kept(response, [*asked, *read_items(items)], size))

    def add(self, kept: Kept) -> None:
        self.kept[kept.response["id"]] = kept
        self.num_bytes += kept.num_bytes
        while len(self.kept) > MAX_KEPT or self.num_bytes > MAX_KEPT_BYTES:
            self.remove(next(iter(self.kept)))

    def remove(self, id: str) -> None:
        self.num_bytes -= self.kept.pop(id).num_bytes

    def get(self, id: str) -> Kept:
        if id not in self.kept:
            reason = "it was not stored, or is forgotten; send the whole conversation"
            raise ApiError(404, f"no response {id[:100]!r} is kept here: {reason}", code="response_not_found")
        self.kept.move_to_end(id)
        return self.kept[id]


@router.post("/v1/responses", summary="Answer a conversation, in the form of OpenAI's Responses")
async def create(request: Request) -> Response:
    service, body = await read_json(request, CreateResponse, ready=True)
    request.state.log["stream"] = body.stream
    responses: Responses = request.app.state.kept_responses
    earlier = Kept({}, [], 0)
    if body.previous_response_id is not None:
        try:
            earlier = responses.get(body.previous_response_id)
        except ApiError as error:  # repeated, it fails again
            raise bad_request(error.message, "previous_response_id", "previous_response_not_found") from None
    asked = [*earlier.messages, *await service.run(lambda: read_items(body.input), request.state.num_bytes)]
    chat = ChatAnswer(request, chat_completion(body, asked))
    output = ResponseOutput(_response(body, service.names[0]))

    def keep() -> None:
        if body.store:
            responses.keep(output.response, asked, earlier, request.state.num_bytes)

    if body.stream:

        def idle() -> bytes:
            return b"".join(map(stream.event, output.start())) or stream.COMMENT

        def failed(error: dict[str, Any]) -> bytes:
            return b"".join(map(stream.event, output.fail(error["error"])))

        events = generate(chat, output, keep)
        return stream.EventStream(events, chat.accepted, service.settings.ping_timeout, idle, encode_error=failed)
    return await stream.collected(request, generate(chat, output, keep), lambda: output.response)


@router.get("/v1/responses/{id}", summary="A response that is kept")
async def retrieve(request: Request, id: str) -> Response:
    return json_response(request.app.state.kept_responses.get(id).response)


@router.delete("/v1/responses/{id}", summary="Forget a response")
async def delete(request: Request, id: str) -> Response:
    request.app.state.kept_responses.get(id)
    request.app.state.kept_responses.remove(id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def generate(chat: ChatAnswer, output: ResponseOutput, keep: Any) -> AsyncGenerator[bytes, None]:
    """The events of a response; `output` grows to the whole one. Calls `keep` before the last event, which tells the
    client that it can continue the response."""
    async with chat.deltas() as deltas:
        async for _, delta in deltas:
            if some := [*output.start(), *output.feed(chat.parts(delta))]:
                yield b"".join(map(stream.event, some))
    events = output.finish(chat.answers[0].output)
    keep()
    yield b"".join(map(stream.event, events))


def _response(body: CreateResponse, model: str) -> dict[str, Any]:
    """The response before its first token."""
    wanted = msgspec.to_builtins(body.text.format) if body.text and body.text.format else {"type": "text"}
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": getattr(body, "metadata", None) or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": {name: value for name, value in wanted.items() if value is not None}},
        "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
        "tools": body.tools or [],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def chat_completion(body: CreateResponse, messages: list[Message]) -> ChatCompletion:
    """The same request as a chat; 400 for what that cannot express."""
    if body.instructions is not None:
        messages = [Message(role="system", content=body.instructions), *messages]
    # Clients send instructions and developer messages, and many templates take one message of the system, the first.
    first = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    if len(first) > 1:
        texts = "\n\n".join(str(message.content) for message in first)
        messages = [Message(role="system", content=texts), *messages[len(first) :]]
    options, effort = dict(body.chat_template_kwargs or {}), None if body.reasoning is None else body.reasoning.effort
    if effort == "none":  # the name that most templates use
        options.setdefault("enable_thinking", False)
    choice: Any = body.tool_choice
    if isinstance(choice, FunctionChoice):
        choice = protocol.NamedTool(type="function", function=protocol.NamedFunction(name=choice.name))
    request = ChatCompletion(
        model=body.model,
        messages=messages,
        stream=body.stream,
        tools=_read_tools(body.tools or []) or None,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if effort == "none" else effort,
        chat_template_kwargs=options or None,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
    )
    if body.text is not None and (wanted := body.text.format) is not None:
        schema = protocol.JsonSchema(name=wanted.name or "", schema=wanted.schema) if wanted.schema else None
        if wanted.type == "json_schema" and schema is None:
            raise bad_request("text.format: json_schema needs a schema", "text.format.schema")
        request.response_format = protocol.ResponseFormat(type=wanted.type, json_schema=schema)
    return request


def _read_tools(tools: list[JsonObject]) -> list[protocol.Tool]:
    found: list[protocol.Tool] = []
    for number, tool in enumerate(tools):
        type = str(tool.get("type"))[:100]
        if type.startswith(HOSTED):
            if type not in _logged and len(_logged) < 100:
                _logged.add(type)
                log.warning("requests come with the tool %r, which does not run here (logged once)", type)
            continue
        try:
            one = msgspec.convert({name: value for name, value in tool.items() if value is not None}, FunctionTool)
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "") if type == "function" else f"{type!r} is not known: use functions"
            raise bad_request(f"tools[{number}]: {reason}", f"tools[{number}]") from None
        function = protocol.ToolFunction(name=one.name, description=one.description, parameters=one.parameters)
        found.append(protocol.Tool(type="function", function=function))
    return found


def read_items(given: str | list[Item]) -> list[Message]:
    """Messages as a chat has them: a thought, a text and calls that follow each other are one message."""
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    messages: list[Message] = []
    answer: Message | None = None
    """The assistant's message that the next item may belong to."""
    for number, item in enumerate(given):
        place = f"input[{number}]"
        if item.type == "function_call_output" or (item.type == "message" and item.role != "assistant"):
            answer = None
            messages.append(_read_asked(item, place))
            continue
        if answer is None or (item.type == "reasoning" and (answer.content or answer.tool_calls)):
            answer = Message(role="assistant")
            messages.append(answer)
        match item:
            case Item(type="message"):
                answer.content = "\n".join(filter(None, [answer.content, _text(item.content, f"{place}.content")]))  # type: ignore[list-item]
            case Item(type="reasoning"):
                thought = _text(item.content or item.summary, f"{place}.content")
                answer.reasoning_content = "\n".join(filter(None, [answer.reasoning_content, thought])) or None
            case Item(type="function_call", call_id=str(id), name=str(name), arguments=str(arguments)):
                function = protocol.FunctionCall(name=name, arguments=arguments)
                answer.tool_calls = [*(answer.tool_calls or []), protocol.ToolCall(function=function, id=id)]
            case Item(type="function_call"):
                raise bad_request(f"{place}: a function_call has a call_id, a name and arguments", place)
            case _:
                raise bad_request(f"{place}: {item.type!r} {Item.OTHER_TYPES}", place)
    return messages


def _read_asked(item: Item, place: str) -> Message:
    if item.type == "message":
        if item.role is None or item.content is None:
            raise bad_request(f"{place}: a message has a role and content", place)
        return Message(role=item.role, content=_text(item.content, f"{place}.content"))
    if item.call_id is None or item.output is None:
        raise bad_request(f"{place}: a function_call_output has a call_id and an output", place)
    return Message(role="tool", content=_text(item.output, f"{place}.output"), tool_call_id=item.call_id)


def _text(content: str | list[TextPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = [part.refusal if part.type == "refusal" else part.text for part in content]
    if None in texts:
        raise bad_request(f"{place}: a part has no text", place)
    return "\n".join(text for text in texts if text is not None)
