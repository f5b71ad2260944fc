"""POST /v1/chat/completions: OpenAI's dialect of a chat, from its body to its chunks. The chat itself is chat's."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import msgspec

from anabranch.engine.output import Answer, Delta
from anabranch.server import logprobs
from anabranch.server.chat import Chat, Conversation, Prepared, Turn, prepare
from anabranch.server.errors import ApiError, bad_request
from anabranch.server.openai_usage import FINGERPRINT, StreamUsage, usage
from anabranch.server.parsers import Content, Named, Part, Reasoning, ToolCallArguments, ToolCallBegin
from anabranch.server.protocol import ChatCompletion, Message, NamedTool, Tokenize, Tool
from anabranch.server.protocol import Part as ContentPart
from anabranch.server.routed import npy_base64
from anabranch.server.sampling import grammar, sampling_params
from anabranch.server.service import Service
from anabranch.server.stream import event

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
        tools=[_tool(tool) for tool in body.tools or []],
        tool_choice=Named(choice.function.name) if isinstance(choice, NamedTool) else choice,
        parallel_tool_calls=getattr(body, "parallel_tool_calls", True),
        template_options=options,
        add_generation_prompt=body.add_generation_prompt,
    )


def _tool(tool: Tool) -> dict[str, Any]:
    function = {name: value for name, value in msgspec.structs.asdict(tool.function).items() if value is not None}
    return {"type": "function", "function": function}


def read_messages(messages: list[Message]) -> list[dict[str, Any]]:
    conversation = Conversation()
    for number, message in enumerate(messages):
        content = _text(message.content, f"messages[{number}].content")
        match message.role:
            case "system" | "developer":
                conversation.add("system", content, message.name)
            case "user":
                conversation.add("user", content, message.name)
            case "assistant":
                calls = [(c.id or "", c.function.name, c.function.arguments) for c in message.tool_calls or []]
                conversation.add_answer(content, message.reasoning_content or message.reasoning, calls)
            case "tool" | "function":
                conversation.add_result(message.tool_call_id, content, message.name)
            case _:
                known = "system, developer, user, assistant, tool"
                raise bad_request(
                    f"messages[{number}].role: {message.role!r} is not one of {known}", f"messages[{number}].role"
                )
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
            raise bad_request(f"{param}[{number}]: {part.type!r} cannot be read: this model takes text only", param)
        texts.append(text)
    return "\n".join(texts)


class ChatAnswer:
    """One request's way from body to answer."""

    def __init__(self, service: Service, body: ChatCompletion, log: dict[str, Any]) -> None:
        self.service, self.body, self.log = service, body, log
        self.id = f"chatcmpl-{uuid4().hex}"  # not the request's: a client may send the same one twice
        self.created = int(time.time())
        self.texts = logprobs.TokenTexts(service.model.tokenizer)

    async def prepare(self) -> None:
        body, service = self.body, self.service
        if body.top_logprobs is not None:
            if not body.logprobs:
                raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
            if not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
                raise bad_request(f"top_logprobs must lie in [0, {MAX_TOP_LOGPROBS}]", "top_logprobs")
        params = sampling_params(
            body,
            service.max_model_len,
            max_tokens=service.max_model_len,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar(body),
        )
        self.prepared: Prepared = await prepare(service, read_chat(body), params)
        self.answer: Answer = service.answer(
            self.id,
            self.prepared.prompt_ids,
            self.prepared.params,
            service.model.chat_tokenizer,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
            arrival=time.monotonic(),
        )
        self.turns: list[Turn] = [self.prepared.turn() for _ in self.answer.requests]
        self.log["prompt_tokens"] = len(self.prepared.prompt_ids)

    async def deltas(self) -> AsyncGenerator[tuple[Delta, list[Part]], None]:
        async with aclosing(self.service.generate([self.answer])) as generated:
            async for _, delta in generated:
                final = delta.completion.finish_reason is not None
                yield delta, self.turns[delta.index].feed(delta.text, final)

    def finish_reason(self, index: int) -> str | None:
        reason = self.answer.output.completions[index].finish_reason
        return "tool_calls" if reason == "stop" and self.turns[index].calls else reason

    # -- whole ---------------------------------------------------------------------------------------------------------

    async def whole(self) -> dict[str, Any]:
        with self.service.admitted(self.body.n or 1):
            await self.prepare()
            async for _ in self.deltas():
                pass
        found = usage([self.answer], self.log)
        reply: dict[str, Any] = self.head("chat.completion")
        reply |= {"choices": [self.choice(index) for index in range(len(self.turns))], "usage": found}
        if self.body.return_token_ids:
            reply["prompt_token_ids"] = self.prepared.prompt_ids
        if (found_logprobs := self.answer.output.prompt_logprobs) is not None:
            reply["prompt_logprobs"] = logprobs.prompt(found_logprobs, self.texts)
        return reply

    def choice(self, index: int) -> dict[str, Any]:
        turn, completion = self.turns[index], self.answer.output.completions[index]
        message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.calls else "")}
        message["refusal"] = None
        if turn.reasoning and self.body.include_reasoning:
            message |= {"reasoning_content": turn.reasoning, "reasoning": turn.reasoning}
        if turn.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": logprobs.chat(completion.logprobs or [], self.texts)}
            if self.body.logprobs
            else None,
            "finish_reason": self.finish_reason(index),
            "stop_reason": completion.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        if completion.routed_experts is not None:
            choice["routed_experts"] = npy_base64(completion.routed_experts)
        return choice

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.names[0],
            "system_fingerprint": FINGERPRINT,
        }

    # -- as it comes ---------------------------------------------------------------------------------------------------

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        with self.service.admitted(self.body.n or 1):
            await self.prepare()
            head = self.head("chat.completion.chunk")
            counted = StreamUsage(self.body.stream_options, [self.answer])
            begun = [False] * len(self.turns)
            async with aclosing(self.deltas()) as deltas:
                async for delta, parts in deltas:
                    choice = self.chunk_choice(delta, parts, first=not begun[delta.index])
                    if choice is None:
                        continue
                    chunk = head | {"choices": [choice], **counted.beside()}
                    if not any(begun) and self.body.return_token_ids:
                        chunk["prompt_token_ids"] = self.prepared.prompt_ids
                    begun[delta.index] = True
                    yield event(chunk)
        found = usage([self.answer], self.log)
        if counted.wanted:
            yield event(head | {"choices": [], "usage": found})

    def chunk_choice(self, delta: Delta, parts: list[Part], first: bool) -> dict[str, Any] | None:
        """None if there is nothing to tell: the text is held back, for half a character or a tag that may come."""
        said = self.said(parts)
        finish = self.finish_reason(delta.index)
        if first:  # the role comes with the first token, whether it has text already or not
            said = {"role": "assistant", "content": said.pop("content", ""), **said}
        choice: dict[str, Any] = {"index": delta.index, "delta": said, "logprobs": None, "finish_reason": finish}
        completion = delta.completion
        if self.body.logprobs and delta.token_ids:
            new = (completion.logprobs or [])[-len(delta.token_ids) :]
            choice["logprobs"] = {"content": logprobs.chat(new, self.texts)}
        if self.body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        if finish is not None:
            choice["stop_reason"] = completion.stop_reason
            if completion.routed_experts is not None:
                choice["routed_experts"] = npy_base64(completion.routed_experts)
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


def check_stream(body: Any) -> None:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
