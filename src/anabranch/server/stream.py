"""Answers whole or as server-sent events; the work is cancelled as soon as the client disconnects.

Knows bytes and connections, no dialect. An answer's status is decided by its first event: a failure before it is an
ordinary error, a failure after it is an `error` event that ends the stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
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

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
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
        result: Result = task.result()
        return result


def json_response(data: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(data), media_type="application/json", headers=headers)


async def whole(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    """The answer when it is complete."""
    return json_response(await while_connected(request.receive, work))


class EventStream(Response):
    """The answer as a stream of events."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(scope["path"], scope["state"], send))
        finally:
            await self.chunks.aclose()

    async def _send(self, path: str, state: dict[str, Any], send: Send) -> None:
        last, begun = b"", False
        try:
            async for chunk in self.chunks:
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                    begun = True
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not begun:
                raise
            if isinstance(error, ApiError):
                state["log"]["error"] = error.code
            else:
                log.exception("request %s failed in the middle of its stream", state["request_id"])
                error = internal(state["request_id"])
            last = event(error.body(path, state["request_id"]))
        await send({"type": "http.response.body", "body": last, "more_body": False})
