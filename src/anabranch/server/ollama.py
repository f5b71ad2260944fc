"""Ollama's dialect: routes, bodies → ChatCompletions and Completions, answers as objects, one a line in a stream.

Models are not loaded, pulled or copied by requests: the one that is served is listed, and a request without a prompt,
which loads a model in Ollama, is answered at once. A last message of the assistant's is continued. Calls of tools are
sent when they are complete, because their arguments are objects.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from msgspec import Meta

from anabranch import __version__
from anabranch.server import protocol, stream
from anabranch.server.anthropic import call_input
from anabranch.server.body import read_json
from anabranch.server.errors import bad_request
from anabranch.server.openai import ChatAnswer, CompletionAnswer
from anabranch.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import Body, ChatCompletion, Completion, Name, StrictObject, ignoring
from anabranch.server.service import Service
from anabranch.server.stream import json_response
from anabranch.text.output import Delta

router = APIRouter()

LOADING = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "use_mmap", "use_mlock", "num_thread", "numa")
"""OllamaOptions of loading a model, which the operator has decided."""
TEXT_ONLY = "images cannot be read: this model takes text only"


@ignoring(*LOADING, "f16_kv", "vocab_only", "num_keep", "repeat_last_n", "penalize_newline")
class OllamaOptions(StrictObject, kw_only=True):
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    """Below 0: without a limit."""
    stop: protocol.StopText | protocol.StopTexts | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@ignoring("index", "description")
class OllamaFunctionCall(StrictObject, kw_only=True):
    name: Name
    arguments: dict[str, Any] | None = None


@ignoring("id", "type")
class OllamaCall(StrictObject, kw_only=True):
    function: OllamaFunctionCall


class OllamaMessage(StrictObject, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Meta(max_length=protocol.MAX_TOOLS)] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None


@ignoring("keep_alive")
class Asking(Body, kw_only=True):
    """The fields that chats and prompts share."""

    ONLY = {
        "logprobs": (False, "ask /v1/chat/completions for log probabilities"),
        "top_logprobs": (0, "ask /v1/chat/completions for log probabilities"),
        "template": ("", "templates cannot come with a request; the operator sets one with --chat-template"),
        "suffix": ("", "text between a prompt and a suffix cannot be filled in: prompts are continued at their end"),
        "context": ([], "conversations go to /api/chat"),
    }
    logprobs: Any = None
    top_logprobs: Any = None
    template: Any = None
    suffix: Any = None
    context: Any = None

    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Name | None = None


class OllamaChat(Asking, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=protocol.MAX_MESSAGES)] = []
    tools: protocol.ToolList | None = None


class OllamaGenerate(Asking, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool = False
    images: list[Any] | None = None


@ignoring("verbose")
class OllamaShow(Body, kw_only=True):
    name: Name | None = None
    """The older name of `model`."""


BODIES: dict[str, type[Body]] = {"/api/chat": OllamaChat, "/api/generate": OllamaGenerate, "/api/show": OllamaShow}


@router.post("/api/chat", summary="Answer a conversation, in Ollama's dialect")
async def chat(request: Request) -> Response:
    service, body = await read_json(request, OllamaChat, ready=True)
    if not body.messages:
        return await _answer(request, body, None)
    wanted = await service.run(lambda: chat_completion(body), request.state.num_bytes)
    return await _answer(request, body, wanted)


@router.post("/api/generate", summary="Answer or continue a prompt, in Ollama's dialect")
async def generate(request: Request) -> Response:
    _, body = await read_json(request, OllamaGenerate, ready=True)
    if body.images:
        raise bad_request(TEXT_ONLY, "images")
    if not body.prompt:
        return await _answer(request, body, None)
    if body.raw:
        wanted = Completion(prompt=body.prompt, model=body.model, max_tokens=request.app.state.service.max_model_len)
        _set_options(wanted, body)
        return await _answer(request, body, wanted)
    system = [] if body.system is None else [OllamaMessage(role="system", content=body.system)]
    asked = OllamaChat(messages=[*system, OllamaMessage(role="user", content=body.prompt)])
    for name in ("model", "format", "options", "think"):
        setattr(asked, name, getattr(body, name))
    return await _answer(request, body, chat_completion(asked))


@router.get("/api/tags", summary="The models served here, in Ollama's dialect")
@router.get("/api/ps", summary="The same: what is served is loaded")
async def tags(request: Request) -> Response:
    service: Service = request.app.state.service
    return json_response({"models": [_about(service, name) for name in service.names]})


@router.get("/api/version", summary="The version, in Ollama's dialect")
async def version() -> Response:
    return json_response({"version": __version__})


@router.post("/api/show", summary="What is known of a model, in Ollama's dialect")
async def show(request: Request) -> Response:
    service, body = await read_json(request, OllamaShow)
    service.check_model(body.name)
    model, about = service.model, _about(service, service.names[0])
    family = about["details"]["family"]
    able = {"completion": True, "tools": model.template.writes_tools, "thinking": model.parsers.thinking is not None}
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "template": model.template.sources.get("default", ""),
            "details": about["details"],
            "model_info": {"general.architecture": family, f"{family}.context_length": service.max_model_len},
            "capabilities": [name for name, can in able.items() if can],
            "modified_at": about["modified_at"],
        }
    )


def _about(service: Service, name: str) -> dict[str, Any]:
    family = service.model.config.model_type
    details = {"parent_model": "", "format": "safetensors", "family": family, "families": [family]}
    details |= {"parameter_size": "", "quantization_level": service.quantization}
    digest = hashlib.sha256(name.encode()).hexdigest()
    began = _time(service.started)
    return {"name": name, "model": name, "modified_at": began, "size": 0, "digest": digest, "details": details}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


async def _answer(request: Request, body: Asking, wanted: ChatCompletion | Completion | None) -> Response:
    """`wanted`: None for a request without a prompt."""
    service: Service = request.app.state.service
    thinks = not isinstance(wanted, ChatCompletion) or wanted.include_reasoning
    reply = Reply(service.names[0], isinstance(body, OllamaChat), thinks)
    request.state.log["stream"] = body.stream
    if wanted is None:
        content = stream.encode(reply.head() | reply.content("") | {"done": True, "done_reason": "load"})
        return Response(content, media_type="application/json")
    answer: ChatAnswer | CompletionAnswer
    answer = ChatAnswer(request, wanted) if isinstance(wanted, ChatCompletion) else CompletionAnswer(request, wanted)
    if body.stream:
        lines, kind = _generate(answer, reply), "application/x-ndjson"
        return stream.EventStream(lines, answer.accepted, service.settings.ping_timeout, bytes, kind, _line)
    return await stream.collected(request, _generate(answer, reply), lambda: reply.whole)


async def _generate(answer: ChatAnswer | CompletionAnswer, reply: Reply) -> AsyncGenerator[bytes, None]:
    """The lines of an answer; `reply` grows to the whole one."""

    def parts(delta: Delta) -> list[Part]:
        return answer.parts(delta) if isinstance(answer, ChatAnswer) else [Content(delta.text)]

    async with answer.deltas() as deltas:
        async for _, delta in deltas:
            if lines := reply.feed(parts(delta), delta.completion.finish_reason is not None):
                yield b"".join(map(_line, lines))
    output = answer.answers[0].output
    (completion,) = output.completions
    yield _line(reply.finish(str(completion.finish_reason), len(output.prompt_ids), len(completion.token_ids)))


def _line(data: dict[str, Any]) -> bytes:
    return stream.encode(data) + b"\n"


def chat_completion(body: OllamaChat) -> ChatCompletion:
    """The same request in OpenAI's dialect."""
    last = body.messages[-1]
    request = ChatCompletion(
        model=body.model,
        messages=[_read_message(message, number) for number, message in enumerate(body.messages)],
        tools=body.tools or None,
        include_reasoning=body.think is not False,
        continue_final_message=last.role == "assistant" and not last.tool_calls,
    )
    if isinstance(body.think, bool):
        request.chat_template_kwargs = {"enable_thinking": body.think}  # the name that most templates use
    else:
        request.reasoning_effort = body.think
    _set_options(request, body)
    return request


def _set_options(request: ChatCompletion | Completion, body: Asking) -> None:
    options = body.options or OllamaOptions()
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty"):
        setattr(request, name, getattr(options, name))
    request.repetition_penalty = options.repeat_penalty
    if options.num_predict is not None and options.num_predict >= 0:
        request.max_tokens = options.num_predict
    if body.format:
        schema = protocol.OBJECT if body.format == "json" else body.format
        request.structured_outputs = protocol.StructuredOutputs(json=schema)  # type: ignore[arg-type]


def _read_message(message: OllamaMessage, number: int) -> protocol.Message:
    if message.images:
        raise bad_request(f"messages[{number}].images: {TEXT_ONLY}", f"messages[{number}].images")
    calls = [
        protocol.ToolCall(function=protocol.FunctionCall(name=call.function.name, arguments=call.function.arguments))
        for call in message.tool_calls or []
    ]
    read = protocol.Message(role=message.role, content=message.content, tool_calls=calls or None)
    read.name, read.tool_call_id, read.reasoning_content = message.tool_name, message.tool_call_id, message.thinking
    return read


class Reply:
    """One answer as objects, and the object that they add up to."""

    def __init__(self, model: str, is_chat: bool, thinks: bool = True) -> None:
        """`thinks`: thoughts are sent."""
        self.model, self.is_chat, self.thinks, self.began = model, is_chat, thinks, time.time()
        self.first: float | None = None
        """When the first token came."""
        self.text, self.thought = "", ""
        self.calls: list[dict[str, Any]] = []
        self.arguments: list[str] = []
        """Text of the arguments, by call."""
        self.num_sent = 0
        """Calls."""
        self.whole: dict[str, Any] = {}

    def head(self) -> dict[str, Any]:
        return {"model": self.model, "created_at": _time(time.time())}

    def content(self, text: str, thought: str = "", calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thought} if thought else {}
        if not self.is_chat:
            return {"response": text, **more}
        more |= {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": text, **more}}

    def feed(self, parts: list[Part], final: bool) -> list[dict[str, Any]]:
        self.first = self.first or time.time()
        lines = []
        for part in parts:
            match part:
                case Content(text) if text:
                    self.text += text
                    lines.append(self.content(text))
                case Reasoning(text) if text and self.thinks:
                    self.thought += text
                    lines.append(self.content("", text))
                case ToolCallBegin(_, id, name):
                    self.calls.append({"id": id, "function": {"index": len(self.calls), "name": name, "arguments": {}}})
                    self.arguments.append("")
                case ToolCallArguments(index, text):
                    self.arguments[index] += text
        num_complete = len(self.calls) if final else len(self.calls) - 1
        if num_complete > self.num_sent:
            complete, self.num_sent = self.calls[self.num_sent : num_complete], num_complete
            for call in complete:
                function = call["function"]
                function["arguments"] = call_input(self.arguments[function["index"]])
            lines.append(self.content("", calls=complete))
        return [{**self.head(), **line, "done": False} for line in lines]

    def finish(self, reason: str, num_prompt: int, num_new: int) -> dict[str, Any]:
        """The last object."""
        now, first = time.time(), self.first or self.began
        ending = {
            "done": True,
            "done_reason": reason,
            "total_duration": round((now - self.began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": num_prompt,
            "prompt_eval_duration": round((first - self.began) * 1e9),
            "eval_count": num_new,
            "eval_duration": round((now - first) * 1e9),
        }
        self.whole = {**self.head(), **self.content(self.text, self.thought, self.calls), **ending}
        return {**self.head(), **self.content(""), **ending}
