"""Answers whole or as server-sent events; the work is cancelled as soon as the client disconnects.

Knows bytes and connections, no dialect. An answer's status is decided by its first event: a failure before it is an
ordinary error, a failure after it is an `error` event that ends the stream.
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

log = logging.getLogger(__name__)

Result = TypeVar("Result")
encode = msgspec.json.encode

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
]
DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + encode(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.encoded() + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. ClientGone as soon as the client has disconnected, after the work was cancelled."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def json_response(data: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(data), media_type="application/json", headers=headers)


async def whole(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """The answer when it is complete."""
    return json_response(await while_connected(request.receive, work))


async def events(
    request: Request,
    chunks: AsyncGenerator[bytes, None],
    last: bytes = DONE,
    on_error: Callable[[ApiError], bytes] = error_event,
) -> Response:
    """The answer as a stream of events."""

    async def first_chunk() -> bytes:
        return await anext(chunks)

    try:
        first = await while_connected(request.receive, first_chunk())
    except BaseException:
        await chunks.aclose()
        raise
    return EventStream(first, chunks, last, on_error)


class EventStream(Response):
    def __init__(
        self, first: bytes, chunks: AsyncGenerator[bytes, None], last: bytes, on_error: Callable[[ApiError], bytes]
    ) -> None:
        super().__init__()
        self.first, self.chunks, self.last, self.on_error = first, chunks, last, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(scope, send))
        except ClientGone:
            scope["state"]["log"]["error"] = "client_gone"
        finally:
            await self.chunks.aclose()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await send({"type": "http.response.body", "body": self.first, "more_body": True})
        end = self.last
        try:
            async for chunk in self.chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except ApiError as error:
            scope["state"]["log"]["error"] = error.code
            end = self.on_error(error)
        except Exception:
            request_id = scope["state"]["request_id"]
            log.exception("request %s failed in the middle of its stream", request_id)
            end = self.on_error(internal(request_id))
        await send({"type": "http.response.body", "body": end, "more_body": False})
