"""The check in front of every route: request id, headers, Host, key, errors as JSON, one line in the log. A slash at
the end of a path is no part of it, and HEAD is answered wherever GET is (uvicorn leaves out the body).

Denies by default: a route that is added later needs the key without further code. Exceptions are health, because load
balancers have no key, and the page's own files (page.PATHS): they are the same in every installation, and the page asks
its user for the key that its requests need.

Without a key, the Host header is the defence against web pages of other sites. A page may send requests to its own host
name only. By DNS rebinding its owner points that name to 127.0.0.1, and the page then reaches the server on its
visitor's machine. The browser still sends the name: an unknown one is refused. An address cannot be rebound, so every
address is allowed.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import re
import socket
import time
from collections import Counter
from typing import Any
from uuid import uuid4

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from anabranch.server import page
from anabranch.server.body import ClientGone
from anabranch.server.errors import ApiError, dialect_of, internal, unavailable
from anabranch.server.settings import Settings, is_loopback, parse_address

log = logging.getLogger("anabranch.server.access")

HEALTH = frozenset(("/health", "/health/live", "/health/ready"))
OPEN = HEALTH | page.PATHS
FREQUENT = ("/health", "/metrics", "/debug/", "/page/")  # requested every second or so, and without interest
CLIENT_GONE = 499  # never sent: for the log and the metrics
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
RawHeaders = list[tuple[bytes, bytes]]
Responses = Counter[tuple[str, int]]
"""Number by route (its pattern, not the requested path: labels must stay few) and status."""


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings, responses: Responses) -> None:
        self.app, self.responses = app, responses
        self.max_header_bytes = settings.max_header_bytes
        self.hosts = Hosts(settings)
        self.keys = [_digest(key.encode()) for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]
        headers: RawHeaders = scope["headers"]
        request_id = _request_id(headers)
        noted: dict[str, Any] = {}
        method, path = scope["method"], scope["path"]
        if len(path) > 2:
            path = path.removesuffix("/")
        dialect = dialect_of(path, any(name == b"anthropic-version" for name, _ in headers))
        scope = {**scope, "path": path, "method": "GET" if method == "HEAD" else method}
        scope.setdefault("state", {}).update(request_id=request_id, log=noted, dialect=dialect)
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
            body = error.encoded(dialect, request_id)
            response = Response(body, error.status, error.headers, media_type="application/json")
            await response(scope, receive, send_with_id)

        try:
            self._check(path, headers)
            await self.app(scope, receive, send_with_id)
        except ApiError as error:
            noted["error"] = error.code
            if not status:
                await respond(error)
        except ClientGone:
            if status:
                noted["error"] = "client_gone"
            status = status or CLIENT_GONE
        except asyncio.CancelledError:  # by uvicorn, at the end of the process: not worth a traceback
            noted["error"] = "server_draining"
            if not status:
                await respond(unavailable("the server is shutting down", "server_draining"))
        except Exception:
            log.exception("request %s: %s %s", request_id, method, _route(scope))
            if not status:
                noted["error"] = "internal_error"
                await respond(internal(request_id))
        finally:
            route = _route(scope)
            self.responses[route, status] += 1
            noted |= {"id": request_id, "method": method, "route": route, "status": status}
            noted["seconds"] = round(time.monotonic() - began, 4)
            log.log(logging.DEBUG if route.startswith(FREQUENT) else logging.INFO, "request", extra={"fields": noted})

    def _check(self, path: str, headers: RawHeaders) -> None:
        close = {"connection": "close"}
        size = sum(len(name) + len(value) + 4 for name, value in headers)
        if size > self.max_header_bytes:
            message = f"the headers have {size} bytes; the limit is {self.max_header_bytes}"
            raise ApiError(431, message, code="headers", headers=close)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
            # A proxy in front may believe the other of the two lengths, and take the rest for another request.
            message = "Content-Length and Transfer-Encoding contradict each other: send one"
            raise ApiError(400, message, code="framing", headers=close)
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"] if path not in HEALTH else []
        if refused := [host for host in hosts if not self.hosts.allow(host)]:
            message = (
                f"the Host {refused[0][:200]!r} is not known here: reach the server by its address or as localhost, "
                "or let the operator name it with --allowed-hosts, or set an API key"
            )
            raise ApiError(403, message, code="host_not_allowed")
        if self.keys and path not in OPEN:
            self._check_key(headers)

    def _check_key(self, headers: RawHeaders) -> None:
        given = [key for name, value in headers for key in _keys(name, value)]
        # Every key against every other, and digests of one length: the time reveals nothing.
        matches = [hmac.compare_digest(_digest(key), known) for key in given for known in self.keys]
        if not any(matches):
            what = "the API key is wrong" if given else "an API key is needed"
            message = f"{what}: send it as `Authorization: Bearer KEY`"
            # Basic is accepted but not offered: a browser would ask for a password before the page asks for the key.
            authenticate = {"www-authenticate": 'Bearer realm="anabranch"'}
            raise ApiError(401, message, code="invalid_api_key", headers=authenticate)


class Hosts:
    """The Host headers that are allowed."""

    def __init__(self, settings: Settings) -> None:
        names = {name.lower().rstrip(".") for name in settings.allowed_hosts}
        self.any = "*" in names or (bool(settings.api_key) and not names)
        """A client that has the key needs no other proof."""
        names |= {"localhost", settings.host.lower()}
        if not is_loopback(settings.host):  # other machines reach this one by its own name
            own = socket.gethostname().lower()
            names |= {own, own.partition(".")[0], f"{own.partition('.')[0]}.local"}
        self.names = names

    def allow(self, header: str) -> bool:
        """`header` is a Host header's value: a name or an address, with a port or without."""
        if self.any:
            return True
        host = header.strip().lower()
        if host.startswith("["):
            host = host[1:].partition("]")[0]
        elif host.count(":") == 1:
            host = host.partition(":")[0]
        host = host.rstrip(".")
        return host in self.names or host.endswith(".localhost") or parse_address(host) is not None


def _keys(name: bytes, value: bytes) -> list[bytes]:
    """The keys in a header: as the openai client sends them, as the anthropic client does, and as a browser sends a
    password."""
    if name == b"x-api-key":
        return [value.strip()]
    scheme, _, rest = value.strip().partition(b" ") if name == b"authorization" else (b"", b"", b"")
    if scheme.lower() == b"bearer":
        return [rest.strip()]
    if scheme.lower() == b"basic":
        with contextlib.suppress(binascii.Error):
            return [base64.b64decode(rest.strip(), validate=True).partition(b":")[2]]
    return []


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(headers: RawHeaders) -> str:
    for name, value in headers:
        if name == b"x-request-id" and _ID.fullmatch(text := value.decode("latin-1")):
            return text
    return f"req-{uuid4().hex}"


def _route(scope: Scope) -> str:
    """The pattern that matched; "unknown" where none did."""
    return getattr(scope.get("route"), "path", "unknown")
