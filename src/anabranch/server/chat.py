"""A conversation → the text and the tokens of its prompt, and the grammar of its answer.

Common to all chat dialects: each turns its bodies into a ChatCompletion. Templates come from the model folder or the
operator, never from a request.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from anabranch.sampling_params import SamplingParams
from anabranch.server.errors import bad_request
from anabranch.server.parsers.parts import Named, ToolChoice, ToolSpec
from anabranch.server.protocol import ChatCompletion, ContentPart, Message, NamedTool, Tokenize, ToolCall
from anabranch.text.call_form import fit_calls
from anabranch.text.chat_template import NO_TOOLS
from anabranch.text.part_form import fit_parts
from anabranch.text.render_chat import Rendered, render_chat

if TYPE_CHECKING:
    from anabranch.server.service import Model, Service

LEFT_OUT: list[dict[str, Any]] = [{"description": ""}, {"parameters": {"type": "object", "properties": {}}}]
"""Members that clients may leave out of a tool, and without which some templates fail."""


class Chat:
    """The conversation in a body, in the form templates are written for; 400 for what no template can write."""

    def __init__(self, body: ChatCompletion | Tokenize) -> None:
        if body.chat_template is not None:
            message = "a chat template cannot come with a request; the operator sets one with --chat-template"
            raise bad_request(message, "chat_template")
        choice, self.template_options = None, dict(body.chat_template_kwargs or {})
        self.parallel_tool_calls = True
        if isinstance(body, ChatCompletion):
            choice, self.parallel_tool_calls = body.tool_choice, body.parallel_tool_calls
            if body.reasoning_effort is not None:
                self.template_options.setdefault("reasoning_effort", body.reasoning_effort)
        choice = choice or ("auto" if body.tools else "none")
        self.tool_choice: ToolChoice = Named(choice.function.name) if isinstance(choice, NamedTool) else choice
        functions = [msgspec.to_builtins(tool.function) for tool in body.tools or []]
        self.tools = [{"type": "function", "function": function} for function in functions]
        self.offered = tuple(ToolSpec(function["name"], function.get("parameters")) for function in functions)
        """The tools the answer may call."""
        if choice == "none":
            self.offered = ()
        self.messages = read_messages(body.messages or [])
        self.continued = body.continue_final_message
        """The answer continues the last message."""
        self.add_generation_prompt = not self.continued if (given := body.add_generation_prompt) is None else given

    @property
    def begun(self) -> str:
        """The text of the message that the answer continues, once it is rendered."""
        content = self.messages[-1]["content"] if self.continued else ""
        return content if isinstance(content, str) else "".join(part["text"] for part in content)

    def check(self) -> None:
        names = [tool["function"]["name"] for tool in self.tools]
        if len(set(names)) < len(names):
            raise bad_request("two tools have the same name", "tools")
        if self.tool_choice not in ("none", "auto") and not names:
            raise bad_request("tool_choice asks for a tool call, but there are no tools", "tool_choice")
        if isinstance(self.tool_choice, Named) and self.tool_choice.name not in names:
            raise bad_request(f"tool_choice: no tool is named {self.tool_choice.name!r}", "tool_choice")
        if self.continued:
            last = self.messages[-1]
            if self.add_generation_prompt:
                message = "continue_final_message needs add_generation_prompt: false: an answer is continued or begun"
                raise bad_request(message, "add_generation_prompt")
            if last["role"] != "assistant" or "tool_calls" in last:
                message = "only a last message of the assistant's that calls no tools can be continued"
                raise bad_request(message, "messages")


def read_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages in the form templates are written for: text or a list of text parts, arguments as
    objects, tool results with a name."""
    found: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # call id → the tool's name: some templates write a result's tool and not its call
    for number, message in enumerate(messages):
        content, name = _content(message.content, f"messages[{number}].content"), message.name
        read: dict[str, Any] = {"role": message.role, "content": content or ""}
        match message.role:
            case "system" | "developer" | "user":
                read["role"] = "user" if message.role == "user" else "system"
            case "assistant":
                name = None
                read["content"] = content if content is not None else message.refusal or ""
                if reasoning := message.reasoning_content or message.reasoning:
                    read |= {"reasoning_content": reasoning, "reasoning": reasoning}
                    if not read["content"]:  # gpt-oss's template reads this, and refuses it beside content
                        read["thinking"] = reasoning
                calls = message.tool_calls or []
                if not calls and message.function_call is not None:
                    calls = [ToolCall(function=message.function_call)]
                if calls:
                    read["tool_calls"] = [
                        tool_call(call.id or "", call.function.name, _arguments(call.function.arguments))
                        for call in calls
                    ]
                    called |= {call.id or "": call.function.name for call in calls}
            case "tool" | "function":
                read["role"] = "tool"
                if message.tool_call_id is not None:
                    read["tool_call_id"] = message.tool_call_id
                name = name or called.get(message.tool_call_id or "")
            case _:
                known, param = "system, developer, user, assistant, tool", f"messages[{number}].role"
                raise bad_request(f"{param}: {message.role!r} is not one of {known}", param)
        if content is None and message.role != "assistant":
            raise bad_request(f"messages[{number}].content is missing", f"messages[{number}].content")
        found.append(read if name is None else read | {"name": name})
    return found


def _content(content: str | list[ContentPart] | None, param: str) -> str | list[dict[str, str]] | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise bad_request(f"{param}[{number}]: {part.type!r} {ContentPart.OTHER_TYPES}", param)
        texts.append(text)
    return [{"type": "text", "text": text} for text in texts] if any(texts) else ""


def _arguments(arguments: Any) -> Any:
    """An object where possible. A model's broken JSON stays the text it was, so that the chat can continue."""
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return value if isinstance(value, dict) else arguments
    return {} if arguments is None else arguments


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call as templates take it and as clients get it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def prepare(service: Service, chat: Chat, params: SamplingParams) -> tuple[str, list[int], SamplingParams]:
    """For `Service.prepare`: the prompt, its tokens, and the parameters with a grammar of the whole output: of the call
    that must come, or of the text that was asked for. A thought before either is free."""
    model = service.model
    chat.check()
    if chat.tool_choice not in ("none", "auto") and params.grammar is not None:
        raise bad_request("tool_choice asks for a tool call, response_format for other text: give one", "tool_choice")
    rendered = render(model, chat)
    prompt_ids = service.encode(rendered, False, "messages")
    grammar, parsers, prompt = params.grammar, model.parsers, rendered.text
    try:
        if grammar is not None:
            grammar = parsers.after_thought(grammar, prompt, chat.begun)
        else:
            parallel = chat.parallel_tool_calls
            grammar = parsers.tool_grammar(chat.offered, chat.tool_choice, prompt, parallel, chat.begun)
    except ValueError as error:
        raise bad_request(str(error), "tool_choice" if params.grammar is None else "structured_outputs") from None
    return prompt, prompt_ids, replace(params, grammar=grammar)


def render(model: Model, chat: Chat) -> Rendered:
    """The text of the prompt; ValueError if the template refuses the messages. Leaves `chat` with parts as written."""
    model.template.check_variables(chat.template_options)
    tools = chat.tools if chat.offered else None
    if tools and not model.template.writes_tools:
        raise bad_request(NO_TOOLS, "tools")
    chat.messages = fit_parts(model.template, model.tokenizer.special_text, chat.messages, bool(tools))
    messages, refused = fit_calls(model.template, chat.messages), None
    for added in ({}, LEFT_OUT[0], LEFT_OUT[0] | LEFT_OUT[1]) if tools else ({},):
        offered = [{**tool, "function": tool["function"] | added | tool["function"]} for tool in tools or []]
        try:
            return render_chat(
                model.template,
                model.tokenizer,
                messages,
                offered or None,
                chat.add_generation_prompt,
                continue_final_message=chat.continued,
                **chat.template_options,
            )
        except ValueError as error:
            refused = refused or error
    assert refused is not None
    raise refused
