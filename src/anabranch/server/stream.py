"""Answers whole or as server-sent events; the work is cancelled as soon as the client disconnects.

Knows bytes and connections, no dialect. An answer's status is decided by its first event: a failure before it is an
ordinary error, a failure after it is an `error` event that ends the stream. So a stream begins with its first token, or
a moment after its request was accepted: proxies and clients give up on connections that are silent for long, as during
the prefill of a long prompt.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from anabranch.server.body import ClientGone
from anabranch.server.errors import ApiError, internal
from anabranch.server.threads import tasks

log = logging.getLogger(__name__)

Result = TypeVar("Result")
encode = msgspec.json.encode

EVENTS = "text/event-stream; charset=utf-8"
COMMENT = b": ping\n\n"
HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
]


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event, with a name where the data has a type, as in Anthropic's dialect."""
    name = b"event: " + data["type"].encode() + b"\n" if "type" in data else b""
    return name + b"data: " + encode(data) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. ClientGone as soon as the client has disconnected, after the work was cancelled."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with tasks(work, disconnect()) as (task, watch):
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()


def json_response(data: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(data), media_type="application/json", headers=headers)


async def whole(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """The answer when it is complete."""
    return json_response(await while_connected(request.receive, work))


async def collected(request: Request, chunks: AsyncGenerator[bytes, None], answer: Callable[[], Any]) -> Response:
    """The same of an answer that grows while it is streamed: what `answer` gives after the last chunk."""

    async def work() -> Any:
        async for _ in chunks:
            pass
        return answer()

    return await whole(request, work())


def comment() -> bytes:
    return COMMENT


class EventStream(Response):
    """The answer as a stream of events."""

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        accepted: asyncio.Future[float],
        interval: float,
        idle: Callable[[], bytes] = comment,
        content_type: str = EVENTS,
        encode_error: Callable[[dict[str, Any]], bytes] = event,
    ) -> None:
        """`accepted`: done when the request was accepted; after that many seconds the stream begins even without a
        chunk. `idle` says what to send then, and whenever nothing was sent for `interval` seconds."""
        super().__init__()
        self.chunks, self.accepted, self.interval = chunks, accepted, interval
        self.idle, self.content_type, self.encode_error = idle, content_type.encode(), encode_error
        self.num_sent = 0
        self.begun = False
        self.begins = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(scope["state"], send))
        finally:
            await self.chunks.aclose()

    async def _send(self, state: dict[str, Any], send: Send) -> None:
        last = b""
        try:
            async with tasks(self._ping(send)):
                async for chunk in self.chunks:
                    self.num_sent += 1
                    if not self.begun:
                        await self._begin(send)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not self.begun:
                raise
            if isinstance(error, ApiError):
                state["log"]["error"] = error.code
            else:
                log.exception("request %s failed in the middle of its stream", state["request_id"])
                error = internal(state["request_id"])
            last = self.encode_error(error.body(state["dialect"], state["request_id"]))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _begin(self, send: Send) -> None:
        async with self.begins:
            if not self.begun:
                self.begun = True
                headers = [(b"content-type", self.content_type), *HEADERS]
                await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _ping(self, send: Send) -> None:
        """Send what keeps the connection alive, whenever nothing else was sent since the last look."""
        await asyncio.sleep(await self.accepted)
        num_seen = 0
        while True:
            if num_seen == self.num_sent:
                await self._begin(send)
                if found := self.idle():
                    await send({"type": "http.response.body", "body": found, "more_body": True})
            num_seen = self.num_sent
            await asyncio.sleep(self.interval)
