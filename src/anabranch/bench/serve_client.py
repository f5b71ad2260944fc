"""An HTTP client of OpenAI-compatible servers that records when each piece of a streamed answer arrives.

Knows HTTP/1.1 and server-sent events, no prompts and no statistics. h11 over asyncio's streams: the client's own time
is measured as the server's, and an ordinary HTTP client takes several times as much per token.
"""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

PIECE = 1 << 16  # bytes to read at once
MAX_HEADERS = 1 << 17


class Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    delta: Text | None = None
    text: str | None = None

    def has_text(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


DECODER = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class Sent:
    """A request and what became of it. Times are those of time.perf_counter, in seconds."""

    started: float = 0.0
    waited: float = 0.0
    """Before it started, because too many others were running."""
    times: list[float] = field(default_factory=list)
    """When each piece of the answer arrived."""
    num_input: int = 0
    num_output: int = 0
    counted: bool = False
    """By the server; else num_output is the number of pieces."""
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.started

    @property
    def e2el(self) -> float:
        return self.times[-1] - self.started

    @property
    def itls(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Refused(Exception):
    """An error that the server reported, with its message."""


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADERS)

    async def send(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> int:
        """Send a request and return the status of its answer; `pieces` gives the body."""
        http = self.http
        request = h11.Request(method=method, target=path, headers=[*headers, ("content-length", str(len(body)))])
        data = [http.send(request), http.send(h11.Data(data=body)), http.send(h11.EndOfMessage())]
        self.writer.write(b"".join(part for part in data if part))
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await self.reader.read(PIECE))
            elif isinstance(event, h11.Response):
                return int(event.status_code)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """Yield the body of the answer, in pieces as they arrive."""
        http = self.http
        while True:
            found = []
            while type(event := http.next_event()) is h11.Data:
                found.append(bytes(event.data))
            if found:
                yield b"".join(found)
            if event is h11.NEED_DATA:
                http.receive_data(await self.reader.read(PIECE))
            elif type(event) is h11.EndOfMessage:
                break
        if http.our_state is h11.DONE and http.their_state is h11.DONE:
            http.start_next_cycle()
        else:
            self.writer.close()


class Client:
    def __init__(self, base_url: str, api_key: str = "") -> None:
        parts = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--base-url {base_url!r} is no address such as http://127.0.0.1:8000")
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.headers = [("host", f"{host}:{self.port}"), ("content-type", "application/json")]
        self.headers += [("authorization", f"Bearer {api_key}")] if api_key else []
        self.idle: list[Connection] = []

    async def stream(self, path: str, body: bytes, sent: Sent) -> None:
        """Send a request and record its answer in `sent`, also a refusal or a broken connection."""
        sent.started = time.perf_counter()
        num_pieces = 0
        try:
            rest = b""
            async with aclosing(self.ask("POST", path, body)) as pieces:
                async for piece in pieces:
                    now = time.perf_counter()
                    *lines, rest = (rest + piece).split(b"\n")
                    for line in lines:
                        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                            continue
                        chunk = DECODER.decode(line[5:])
                        if chunk.error:
                            raise Refused(reason(chunk.error))
                        if chunk.usage is not None:
                            sent.num_input = chunk.usage.prompt_tokens
                            sent.num_output = chunk.usage.completion_tokens or 0
                            sent.counted = True
                        if chunk.choices:  # even without text: servers may hold it back, and the last often has none
                            sent.times.append(now)
                            num_pieces += chunk.choices[0].has_text()
            if not sent.times:
                sent.error = "the answer was empty"
        except (OSError, h11.RemoteProtocolError, msgspec.MsgspecError, Refused) as error:
            sent.error = str(error) or type(error).__name__
        if not sent.counted:
            sent.num_output = num_pieces

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        encoded = b"" if body is None else json.dumps(body).encode()
        return json.loads(b"".join([piece async for piece in self.ask(method, path, encoded)]))

    async def ask(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """Yield the body of an answer as it arrives; raise Refused if its status is not 200."""
        reused = bool(self.idle)
        connection = self.idle.pop() if reused else await self.connect()
        try:
            try:
                status = await connection.send(method, self.prefix + path, self.headers, body)
            except (OSError, h11.RemoteProtocolError):
                if not reused:
                    raise
                connection.writer.close()  # the server had closed it while it was idle
                connection = await self.connect()
                status = await connection.send(method, self.prefix + path, self.headers, body)
            if status != 200:
                text = b"".join([piece async for piece in connection.pieces()])
                raise Refused(f"HTTP {status}: {reason(text)}")
            async for piece in connection.pieces():
                yield piece
        except BaseException:
            connection.writer.close()  # its unread rest would be taken for the next answer
            raise
        if not connection.writer.is_closing():
            self.idle.append(connection)

    async def connect(self) -> Connection:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=self.tls, limit=PIECE)
        except OSError as error:
            cure = "is a server running there? `anabranch serve` starts one"
            raise OSError(f"no connection to {self.host}:{self.port} ({error.strerror or error}); {cure}") from None
        return Connection(reader, writer)

    def close(self) -> None:
        while self.idle:
            self.idle.pop().writer.close()


def reason(error: Any) -> str:
    """The message inside an error, in any of the formats servers use."""
    if isinstance(error, bytes):
        try:
            error = json.loads(error)
        except ValueError:
            error = error.decode(errors="replace")
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or error.get("detail") or str(error)
    return " ".join(str(error).split())[:300]
