"""The routes of Anthropic's dialect: a message, whole or as events, and how many tokens its prompt has.

Bodies, blocks and events are anthropic's; between them a message is a chat like any other.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import msgspec
from fastapi import APIRouter, Request, Response

from anabranch.server import stream
from anabranch.server.anthropic import (
    CountTokens,
    Messages,
    Reply,
    chat_completion,
    encode,
    error_body,
    shows_thinking,
)
from anabranch.server.body import read_json
from anabranch.server.chat import render
from anabranch.server.errors import ApiError
from anabranch.server.openai_chat import ChatAnswer, read_chat
from anabranch.server.service import Service
from anabranch.server.stream import json_response

router = APIRouter()

BODIES: dict[str, type[msgspec.Struct]] = {"/v1/messages": Messages, "/v1/messages/count_tokens": CountTokens}


@router.post("/v1/messages", summary="Answer a conversation, in Anthropic's dialect")
async def messages(request: Request) -> Response:
    body = await read_json(request, Messages)
    service: Service = request.app.state.service
    service.check_ready()
    service.check_model(body.model)
    log = request.state.log
    log["stream"] = body.stream
    num_bytes = request.state.num_bytes
    chat = ChatAnswer(service, await service.run(lambda: chat_completion(body), num_bytes), log, num_bytes)
    answer = MessagesAnswer(chat, shows_thinking(body))
    if not body.stream:
        return await stream.whole(request, answer.whole())

    def on_error(error: ApiError) -> bytes:
        return encode(error_body(error, request.state.request_id))

    return await stream.events(request, answer.events(), last=b"", on_error=on_error)


@router.post("/v1/messages/count_tokens", summary="The number of tokens of a conversation, in Anthropic's dialect")
async def count_tokens(request: Request) -> Response:
    body = await read_json(request, CountTokens)
    service: Service = request.app.state.service
    service.check_model(body.model)

    def work() -> int:
        chat = read_chat(chat_completion(body))
        chat.check()
        rendered = render(service.model, chat)
        return len(service.count(rendered.text, False, "messages", rendered.plain))

    return json_response({"input_tokens": await service.prepare(work, "messages", request.state.num_bytes)})


class MessagesAnswer:
    """One request's way from body to answer."""

    def __init__(self, chat: ChatAnswer, shows_thinking: bool) -> None:
        self.service, self.chat = chat.service, chat
        self.reply = Reply(f"msg_{uuid4().hex}", self.service.names[0], shows_thinking)

    async def whole(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        return self.reply.message

    async def events(self) -> AsyncGenerator[bytes, None]:
        with self.service.admitted(1):
            await self.chat.prepare()
            output, begun = self.chat.answers[0].output, False
            async with aclosing(self.service.generate(self.chat.answers)) as generated:
                async for _, delta in generated:
                    # The beginning comes with the first token: what fails before it is an answer with a status.
                    some = [] if begun else [self.reply.start(len(output.prompt_ids), output.num_cached)]
                    begun = True
                    some += self.reply.feed(self.chat.parts(delta))
                    if some:  # text may be held back, for half a character or a tag that may come
                        yield b"".join(map(encode, some))
        self.chat.end()
        (said,) = output.completions
        assert said.finish_reason is not None
        counts = len(output.prompt_ids), output.num_cached, len(said.token_ids)
        yield b"".join(map(encode, self.reply.finish(said.finish_reason, said.stop_reason, *counts)))
