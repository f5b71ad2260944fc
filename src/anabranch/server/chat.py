"""A conversation → the tokens of its prompt, and the text of an answer → content, reasoning and tool calls.

The core of every chat dialect: a dialect makes a Chat from its own bodies, and its own answers from a Turn. Templates
come from the model folder or the operator, never from a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from anabranch.sampling_params import Grammar, SamplingParams
from anabranch.server.errors import bad_request
from anabranch.server.parsers.parts import (
    Content,
    Named,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallBegin,
    ToolChoice,
    ToolSpec,
)
from anabranch.server.parsers.reader import Reader
from anabranch.text.chat_template import NO_TOOLS
from anabranch.text.special_text import Rendered, render_chat

if TYPE_CHECKING:
    from anabranch.server.service import Model, Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    messages: list[dict[str, Any]]
    """As templates take them; `Conversation` makes them."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """{"type": "function", "function": {"name", "description", "parameters"}}: the form templates are written for."""
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools the answer may call."""
        if self.tool_choice == "none":
            return ()
        functions = [tool["function"] for tool in self.tools]
        return tuple(ToolSpec(function["name"], function.get("parameters")) for function in functions)

    def check(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_request("two tools have the same name", "tools")
        if self.tool_choice not in ("none", "auto") and not names:
            raise bad_request("tool_choice asks for a tool call, but there are no tools", "tool_choice")
        if isinstance(self.tool_choice, Named) and self.tool_choice.name not in names:
            raise bad_request(f"tool_choice: no tool is named {self.tool_choice.name!r}", "tool_choice")


class Conversation:
    """Messages in the form templates are written for: plain text, arguments as objects, tool results with a name."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._called: dict[str, str] = {}
        """Call id → the tool's name: some templates write a result's tool and not its call."""

    def add(self, role: str, content: str | None, name: str | None = None) -> None:
        message: dict[str, Any] = {"role": role, "content": content or ""}
        if name is not None:
            message["name"] = name
        self.messages.append(message)

    def add_answer(self, content: str | None, reasoning: str | None, calls: list[tuple[str, str, Any]]) -> None:
        """Of the assistant; `calls` are (id, name, arguments)."""
        message: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": _arguments(arguments)}}
                for id, name, arguments in calls
            ]
            self._called |= {id: name for id, name, _ in calls}
        self.messages.append(message)

    def add_result(self, call_id: str | None, content: str | None, name: str | None = None) -> None:
        """Of a tool."""
        message: dict[str, Any] = {"role": "tool", "content": content or ""}
        if call_id is not None:
            message["tool_call_id"] = call_id
        if (name := name or self._called.get(call_id or "")) is not None:
            message["name"] = name
        self.messages.append(message)


def _arguments(arguments: Any) -> Any:
    """An object where it is one. A model's broken JSON comes back as the text it was, rather than end the chat."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return {} if arguments is None else arguments


@dataclass(frozen=True, slots=True)
class Prepared:
    """A chat that is ready for the engine."""

    prompt: str
    prompt_ids: list[int]
    params: SamplingParams
    chat: Chat
    model: Model

    def turn(self) -> Turn:
        """One for each of the n answers."""
        chat = self.chat
        reader = self.model.parsers.start(chat.offered, chat.tool_choice, reasoning=True, prompt=self.prompt)
        return Turn(reader, chat.parallel_tool_calls)


def prepare(service: Service, chat: Chat, params: SamplingParams) -> Prepared:
    """Render, tokenise, and bind an answer that must be a tool call to its grammar. For `Service.prepare`."""
    model = service.model
    chat.check()
    if chat.tool_choice not in ("none", "auto") and params.grammar is not None:
        raise bad_request("tool_choice asks for a tool call, response_format for other text: give one", "tool_choice")
    rendered = render(model, chat)
    prompt, prompt_ids = rendered.text, service.encode(rendered.text, False, "messages", rendered.plain)
    return Prepared(prompt, prompt_ids, replace(params, grammar=_grammar(model, chat, params, prompt)), chat, model)


def _grammar(model: Model, chat: Chat, params: SamplingParams, prompt: str) -> Grammar | None:
    """Of the whole output: the call that must come, or what was asked for, a thought before either being free."""
    try:
        if params.grammar is not None:
            return model.parsers.after_thought(params.grammar, prompt)
        return model.parsers.tool_grammar(chat.offered, chat.tool_choice, prompt, chat.parallel_tool_calls)
    except ValueError as error:
        raise bad_request(str(error), "tool_choice" if params.grammar is None else "structured_outputs") from None


def render(model: Model, chat: Chat) -> Rendered:
    """The text of the prompt; ValueError if the template refuses the messages."""
    model.template.check_variables(chat.template_options)
    tools = chat.tools if chat.offered else None
    if tools and not model.template.writes_tools:
        raise bad_request(NO_TOOLS, "tools")
    return render_chat(
        model.template, model.tokenizer, chat.messages, tools, chat.add_generation_prompt, **chat.template_options
    )


@dataclass(slots=True)
class Call:
    id: str
    name: str
    arguments: str = ""


class Turn:
    """One answer while it grows: what each piece of text brought, and the whole."""

    def __init__(self, reader: Reader, parallel_tool_calls: bool = True) -> None:
        self._reader = reader
        self._one_call = not parallel_tool_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[Call] = []

    def feed(self, text: str, final: bool = False) -> list[Part]:
        parts = self._reader.feed(text, final)
        if self._one_call:
            parts = [part for part in parts if getattr(part, "index", 0) == 0]
        for part in parts:
            match part:
                case Content(piece):
                    self._content.append(piece)
                case Reasoning(piece):
                    self._reasoning.append(piece)
                case ToolCallBegin(_, id, name):
                    self.calls.append(Call(id, name))
                case ToolCallArguments(index, piece):
                    self.calls[index].arguments += piece
        return parts

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)
