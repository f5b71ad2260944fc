"""POST /v1/chat/completions: OpenAI's dialect of a chat, from its body to its chunks. The chat itself is chat's."""

from __future__ import annotations

from typing import Any

import msgspec

from anabranch.request import Completion
from anabranch.server import logprobs
from anabranch.server.chat import Chat, Conversation, Prepared, Turn, prepare
from anabranch.server.errors import bad_request
from anabranch.server.openai_answer import Choice, OpenAIAnswer, routed_experts
from anabranch.server.parsers.parts import Content, Named, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import ChatCompletion, Message, NamedTool, Tokenize
from anabranch.server.protocol import Part as ContentPart
from anabranch.server.sampling import grammar, sampling_params
from anabranch.text.output import Delta

MAX_TOP_LOGPROBS = 20


def read_chat(body: ChatCompletion | Tokenize) -> Chat:
    """The conversation in a body; 400 for what no template can be asked to write."""
    if body.chat_template is not None:
        raise bad_request(
            "a chat template cannot come with a request; the operator sets one with --chat-template", "chat_template"
        )
    choice: Any = "none"
    options = dict(body.chat_template_kwargs or {})
    if isinstance(body, ChatCompletion):
        choice = body.tool_choice or ("auto" if body.tools else "none")
        if body.reasoning_effort is not None:
            options.setdefault("reasoning_effort", body.reasoning_effort)
    elif body.tools:
        choice = "auto"
    return Chat(
        messages=read_messages(body.messages or []),
        tools=[{"type": tool.type, "function": msgspec.to_builtins(tool.function)} for tool in body.tools or []],
        tool_choice=Named(choice.function.name) if isinstance(choice, NamedTool) else choice,
        parallel_tool_calls=getattr(body, "parallel_tool_calls", True),
        template_options=options,
        add_generation_prompt=body.add_generation_prompt,
    )


def read_messages(messages: list[Message]) -> list[dict[str, Any]]:
    conversation = Conversation()
    for number, message in enumerate(messages):
        content = _text(message.content, f"messages[{number}].content")
        match message.role:
            case "system" | "developer" | "user":
                conversation.add("user" if message.role == "user" else "system", content, message.name)
            case "assistant":
                calls = [(c.id or "", c.function.name, c.function.arguments) for c in message.tool_calls or []]
                if not calls and (call := message.function_call) is not None:
                    calls = [("", call.name, call.arguments)]
                content = message.refusal if content is None else content
                conversation.add_answer(content, message.reasoning_content or message.reasoning, calls)
            case "tool" | "function":
                conversation.add_result(message.tool_call_id, content, message.name)
            case _:
                known, param = "system, developer, user, assistant, tool", f"messages[{number}].role"
                raise bad_request(f"{param}: {message.role!r} is not one of {known}", param)
        if content is None and message.role != "assistant":
            raise bad_request(f"messages[{number}].content is missing", f"messages[{number}].content")
    return conversation.messages


def _text(content: str | list[ContentPart] | None, param: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.text if part.type == "text" else part.refusal if part.type == "refusal" else None
        if text is None:
            raise bad_request(f"{param}[{number}]: {part.type!r} {ContentPart.OTHER_KINDS}", param)
        texts.append(text)
    return "\n".join(texts)


class ChatAnswer(OpenAIAnswer[ChatCompletion]):
    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"

    async def prepare(self) -> None:
        body, service = self.body, self.service
        if body.top_logprobs is not None:
            if not body.logprobs:
                raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
            if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
                raise bad_request(f"top_logprobs must lie in [0, {MAX_TOP_LOGPROBS}]", "top_logprobs")

        def work() -> Prepared:
            params = sampling_params(
                body,
                service.model.sampling_defaults,
                max_tokens=service.max_model_len,
                logprobs=(body.top_logprobs or 0) if body.logprobs else None,
                grammar=grammar(body),
            )
            return prepare(service, read_chat(body), params)

        self.prepared = await service.prepare(work, "messages", self.num_bytes)
        self.add(self.id, self.prepared.prompt_ids, self.prepared.params, service.model.chat_tokenizer)
        self.turns = [self.prepared.turn() for _ in self.answers[0].requests]
        self.log["prompt_tokens"] = len(self.prepared.prompt_ids)

    def parts(self, delta: Delta) -> list[Part]:
        """What the text of a delta is; each must come by here once."""
        return self.turns[delta.index].feed(delta.text, delta.completion.finish_reason is not None)

    def beside(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.prepared.prompt_ids} if self.body.return_token_ids else {}

    async def whole(self) -> dict[str, Any]:
        reply = await super().whole()
        if (found := self.answers[0].output.prompt_logprobs) is not None:
            reply["prompt_logprobs"] = logprobs.prompt(found, self.texts)
        return reply

    def choice(self, number: int, completion: Completion) -> Choice:
        turn = self.turns[completion.index]
        turn.feed(completion.text, final=True)
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
        message["refusal"] = None
        if turn.reasoning and self.body.include_reasoning:
            message |= {"reasoning_content": turn.reasoning, "reasoning": turn.reasoning}
        if turn.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        choice = {"index": completion.index, "message": message, "logprobs": None}
        if self.body.logprobs:
            choice["logprobs"] = {"content": logprobs.chat(completion.logprobs or [], self.texts)}
        choice |= {"finish_reason": finish_reason(completion, turn), "stop_reason": completion.stop_reason}
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice | routed_experts(completion)

    def chunk_choice(self, number: int, delta: Delta, first: bool) -> Choice | None:
        """Text is held back for half a character, or a tag that may come."""
        said, completion = self.said(self.parts(delta)), delta.completion
        finish = finish_reason(completion, self.turns[delta.index])
        if first:  # the role comes with the first token, whether it has text already or not
            said = {"role": "assistant", "content": said.pop("content", ""), **said}
        choice: Choice = {"delta": said, "logprobs": None, "finish_reason": finish}
        if self.body.logprobs and delta.token_ids:
            new = (completion.logprobs or [])[-len(delta.token_ids) :]
            choice["logprobs"] = {"content": logprobs.chat(new, self.texts)}
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if finish is not None:
            choice |= {"stop_reason": completion.stop_reason, **routed_experts(completion)}
        told = said or finish or choice["logprobs"] or choice.get("token_ids")
        return choice if told else None

    def said(self, parts: list[Part]) -> dict[str, Any]:
        """Parts as one delta: text of a kind joined, pieces of a call's arguments too."""
        said: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case Content(text) if text:
                    said["content"] = said.get("content", "") + text
                case Reasoning(text) if text and self.body.include_reasoning:
                    said["reasoning_content"] = said["reasoning"] = said.get("reasoning", "") + text
                case ToolCallBegin(index, id, name):
                    function = {"name": name, "arguments": ""}
                    calls[index] = {"index": index, "id": id, "type": "function", "function": function}
                case ToolCallArguments(index, text) if text:
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            said["tool_calls"] = list(calls.values())
        return said


def finish_reason(completion: Completion, turn: Turn) -> str | None:
    return "tool_calls" if completion.finish_reason == "stop" and turn.calls else completion.finish_reason
