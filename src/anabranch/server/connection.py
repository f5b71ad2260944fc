"""uvicorn's HTTP/1.1 connection with limits: on the number of connections, the time and size of headers, the rest of a
refused body, and the time in which a client receives nothing. Errors of HTTP itself have the same JSON as all others.
"""

import asyncio
import contextlib
import logging
import resource
import sys
import time
from typing import Any
from uuid import uuid4

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from anabranch.server.errors import ApiError, unavailable
from anabranch.server.settings import Settings

log = logging.getLogger("anabranch.server")

DRAIN_SECONDS = 5.0  # for a client to finish sending a refused body: disconnected earlier, it would miss the answer
MAX_DRAIN = 256 * 2**20  # bytes of that body
LOG_SECONDS = 10.0  # between two warnings

WANTED_FILES = 65536  # open files; more is of no use, and a limit of a billion makes some programs slow
FEWER_FILES = (10240, 4096)  # tried in turn where the system refuses more: macOS does, with an unlimited hard limit
OTHER_FILES = 64  # that the process has open in addition to its connections
ACCEPTED_AT_ONCE = 64  # connections accepted before the first of them is counted
MOST_CONNECTIONS = 8192  # by default
FEWEST_CONNECTIONS = 16


def raise_file_limit() -> int:
    """Raise the limit of open files of this process and its children as far as allowed; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return WANTED_FILES
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else hard
    for wanted in (min(most, WANTED_FILES), *FEWER_FILES):
        if soft < wanted <= most:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                return wanted
    return soft


def max_connections(wanted: int | None, file_limit: int) -> int:
    """How many connections may be open at once; None: as many as fit, up to MOST_CONNECTIONS. ValueError if they do not
    fit under the limit of open files."""
    fitting, fewest = file_limit - OTHER_FILES - ACCEPTED_AT_ONCE, wanted or FEWEST_CONNECTIONS
    if fitting < fewest:
        needed = fewest + OTHER_FILES + ACCEPTED_AT_ONCE
        raise ValueError(
            f"{fewest} connections need {needed} open files and the limit is {file_limit}: "
            f"raise it with `ulimit -n {needed}`" + (", or lower --max-connections" if wanted else "")
        )
    return wanted or min(MOST_CONNECTIONS, fitting)


class LimitedWarning:
    """A warning that clients can cause at will: logged once every LOG_SECONDS, with the number left out."""

    def __init__(self) -> None:
        self.next = 0.0
        self.num_left_out = 0

    def warn(self, message: str) -> None:
        if (now := time.monotonic()) < self.next:
            self.num_left_out += 1
            return
        log.warning("%s%s", message, f" ({self.num_left_out} times more before)" if self.num_left_out else "")
        self.next, self.num_left_out = now + LOG_SECONDS, 0


class Connection(H11Protocol):
    def __init__(self, settings: Settings, max_connections: int, full: LimitedWarning, **options: Any) -> None:
        """`full` is common to all connections of a server; `options` are uvicorn's."""
        super().__init__(**options)
        self.settings, self.max_connections, self.full = settings, max_connections, full
        self._timer: asyncio.TimerHandle | None = None
        self._timed = ""
        """What the timer is for: "headers", "refused body", "refused" (an error was sent; the client closes) or ""."""
        self._stall: asyncio.TimerHandle | None = None
        self._num_drained = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) < self.max_connections:
            super().connection_made(transport)
            self._time("headers", self.settings.header_timeout)
            return
        # Answer without waiting for a request, and close.
        error = unavailable(f"all {self.max_connections} connections are in use; try again later", "connections")
        self.full.warn(f"{error.message.partition(';')[0]} (--max-connections): new ones get 503")
        transport.set_protocol(asyncio.Protocol())  # ignore all further events
        transport.write(self._response(error))
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._time("")
        self._unset_keepalive_if_required()
        if self._stall is not None:
            self._stall.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._timed == "refused":
            self._drain(len(data))
            return
        super().data_received(data)
        self._update_timer(len(data))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timer(0)

    def _update_timer(self, num_bytes: int) -> None:
        """Set the timer for what the connection waits for now."""
        if self._timed == "refused":
            return
        if self.transport.is_closing():
            self._time("")
        elif self.conn.their_state is h11.IDLE:
            # Before the first byte of the next request uvicorn's keep-alive timeout applies.
            waiting = self.conn.trailing_data[0] != b""
            self._time("headers" if waiting else "", self.settings.header_timeout)
        elif self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self._time("refused body", DRAIN_SECONDS)
            self._drain(num_bytes)
        else:
            self._time("")

    def _drain(self, num_bytes: int) -> None:
        self._num_drained += num_bytes
        if self._num_drained > MAX_DRAIN:
            self.transport.close()

    def _time(self, what: str, seconds: float = 0.0) -> None:
        """Start the timer for `what`, or stop it for ""; a timer that runs for the same thing continues."""
        if what == self._timed:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timed = what
        if what:
            self._timer = self.loop.call_later(seconds, self._on_timeout)

    def _on_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self._timed == "headers" and self.conn.trailing_data[0]:
            self._refuse(ApiError(408, "the headers did not arrive in time", code="request_timeout"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Called while h11's error is being handled."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            limit = self.settings.max_header_bytes
            self._refuse(ApiError(431, f"the headers are larger than the limit of {limit} bytes", code="headers"))
        else:
            self._refuse(ApiError(status, "this is not valid HTTP/1.1", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(self._response(error))
            if self.cycle is not None and not self.cycle.response_complete:  # tell the request's task
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            # If it closed now with input unread, the system would reset the connection and the answer could be lost.
            with contextlib.suppress(OSError):  # the client has reset it meanwhile
                self.transport.write_eof()
            self._time("refused", DRAIN_SECONDS)
        else:
            self.transport.close()

    def _response(self, error: ApiError) -> bytes:
        """The bytes of an answer that ends the connection."""
        body, status = error.encoded(), error.status
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= {"x-request-id": f"req-{uuid4().hex}", **error.headers}
        start = h11.Response(status_code=status, headers=list(headers.items()), reason=STATUS_PHRASES[status])
        return b"".join(self.conn.send(event) or b"" for event in (start, h11.Data(data=body), h11.EndOfMessage()))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.settings.stall_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
