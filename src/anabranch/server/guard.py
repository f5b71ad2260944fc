"""The check in front of every route: request id, headers, Host, key, envelope of errors, one line in the log.

Denies by default: a route that is added later needs the key without being told. Health is an exception, because load
balancers have no key, and so are the page's own files (page.PATHS): they hold nothing but what every copy of Anabranch
holds, and the page asks a person for the key that its requests need.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.server import page
from anabranch.server.body import ClientGone
from anabranch.server.errors import ApiError, bad_request, internal, unavailable
from anabranch.server.hosts import Hosts
from anabranch.server.settings import Settings

log = logging.getLogger("anabranch.server.access")

HEALTH = frozenset(("/health", "/health/live", "/health/ready"))
OPEN = HEALTH | page.PATHS
CLIENT_GONE = 499  # nobody receives it; the log and the metrics do
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings, encode_error: Callable[[ApiError, str, str], bytes]) -> None:
        self.app, self.encode_error = app, encode_error
        self.max_header_bytes = settings.max_header_bytes
        self.hosts = Hosts(settings)
        self.keys = [_digest(key.encode()) for key in settings.api_key]
        self.responses: Counter[tuple[str, int]] = Counter()
        """By route (its pattern, not the path asked for: labels must stay few) and status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = _request_id(headers)
        noted: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, log=noted)
        began, status = time.monotonic(), 0
        # OpenAI's client reads the first, Anthropic's the second.
        id_headers = [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *id_headers]
            await send(message)

        async def respond(error: ApiError) -> None:
            body = self.encode_error(error, scope["path"], request_id)
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await send_with_id({"type": "http.response.start", "status": error.status, "headers": headers})
            await send_with_id({"type": "http.response.body", "body": body})

        try:
            self._check(scope["path"], headers)
            await self.app(scope, receive, send_with_id)
        except ApiError as error:
            noted["error"] = error.code
            await respond(error)
        except ClientGone:
            status = CLIENT_GONE
        except asyncio.CancelledError:  # by uvicorn, at the end of the process: not worth a traceback
            noted["error"] = "server_draining"
            if not status:
                await respond(unavailable("the server is shutting down", "server_draining"))
        except Exception:
            log.exception("request %s: %s %s", request_id, scope["method"], _route(scope))
            if not status or status == 500:  # FastAPI's own handler may have answered
                noted["error"] = "internal_error"
            if not status:
                await respond(internal(request_id))
        finally:
            route = _route(scope)
            self.responses[route, status] += 1
            noted |= {"id": request_id, "method": scope["method"], "route": route, "status": status}
            noted["seconds"] = round(time.monotonic() - began, 4)
            quiet = route in HEALTH or route == "/metrics" or route.startswith(("/debug/", "/page/"))
            log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": noted})

    def _check(self, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size > self.max_header_bytes:
            message = f"the headers have {size} bytes; the limit is {self.max_header_bytes}"
            raise ApiError(431, message, code="headers", headers={"connection": "close"})
        self._check_framing(headers)
        self._check_host(path, headers)
        if not self.keys or path in OPEN:
            return
        given = [key for name, value in headers for key in _keys(name, value)]
        # Every key against every other, and digests of one length: the time tells nothing.
        matches = [hmac.compare_digest(_digest(key), known) for key in given for known in self.keys]
        if not any(matches):
            what = "the API key is wrong" if given else "an API key is needed"
            raise ApiError(
                401,
                f"{what}: send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
                # Not Basic, though it is taken: a browser would ask for a password before the page can ask for the key.
                headers={"www-authenticate": 'Bearer realm="anabranch"'},
            )

    def _check_framing(self, headers: list[tuple[bytes, bytes]]) -> None:
        """A proxy in front may believe the other of two lengths, and take the rest for another request."""
        names = {name for name, _ in headers}
        if b"content-length" in names and b"transfer-encoding" in names:
            error = bad_request("Content-Length and Transfer-Encoding contradict each other: send one", code="framing")
            error.headers["connection"] = "close"
            raise error

    def _check_host(self, path: str, headers: list[tuple[bytes, bytes]]) -> None:
        for name, value in headers:
            if name == b"host" and path not in HEALTH and not self.hosts.allow(host := value.decode("latin-1")):
                message = (
                    f"the Host {host[:200]!r} is not known here: reach the server by its address or as localhost, "
                )
                message += "or let the operator name it with --allowed-hosts, or set an API key"
                raise ApiError(403, message, code="host_not_allowed")


def _keys(name: bytes, value: bytes) -> list[bytes]:
    """The keys in a header: as the openai client sends them, as the anthropic client does, and as a browser asks a
    person for a password."""
    if name == b"x-api-key":
        return [value.strip()]
    if name != b"authorization":
        return []
    kind, _, rest = value.strip().partition(b" ")
    if kind.lower() == b"bearer":
        return [rest.strip()]
    if kind.lower() == b"basic":
        try:
            return [base64.b64decode(rest.strip(), validate=True).partition(b":")[2]]
        except binascii.Error:
            return []
    return []


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _ID.fullmatch(text := value.decode("latin-1")):
            return text
    return f"req-{uuid4().hex}"


def _route(scope: Scope) -> str:
    """The pattern that matched; one word for all that matched nothing."""
    return getattr(scope.get("route"), "path", "unknown")
