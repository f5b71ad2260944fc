"""The server's process: listen, load, serve, drain. Exit codes:

    0    ended by a signal, whether all running requests finished in time or not
    1    the engine did not start, died, or hung
    130  ended early by a second signal (143 for SIGTERM)

The port answers from the beginning, so that probes see "loading". The engine is a child process that cannot outlive
this one. Nothing here knows a route.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvicorn

from anabranch import messages
from anabranch.config import EngineConfig
from anabranch.engine.client import EngineClient, EngineDead
from anabranch.loader.checkpoint import read_checkpoint
from anabranch.loader.locate import locate
from anabranch.models.config import read_config
from anabranch.models.generation import read_sampling_defaults
from anabranch.server import connection
from anabranch.server.app import make_app
from anabranch.server.connection import Connection, LimitedWarning
from anabranch.server.history import INTERVAL, Throughput
from anabranch.server.parsers.choose import find_parsers
from anabranch.server.service import Client, Model, Service
from anabranch.server.settings import Settings
from anabranch.server.threads import tasks
from anabranch.server.tracing import traced
from anabranch.text.chat_template import ChatTemplate
from anabranch.text.tokenizer import Tokenizer

log = logging.getLogger("anabranch.server")

MAKE_ENGINE = "anabranch.engine.engine:make_engine"
GRACE = 1.0  # seconds in which answers and health are still sent after the engine's death
LAST_WRITES = 5.0  # seconds for clients to receive what was written, at the end
END = 2.0  # seconds of the shutdown timeout that are reserved for ending what has not finished
WATCH = 0.25  # seconds between two checks of the engine
BACKLOG = 2048  # connections that the system holds until they are accepted


StartClient = Callable[..., Awaitable[Client]]
"""EngineClient.start, or what takes its arguments."""


def serve(
    settings: Settings,
    engine: EngineConfig,
    make_engine: str = MAKE_ENGINE,
    start_client: StartClient = EngineClient.start,
) -> int:
    """Serve until the end and return the exit code. ValueError or OSError for mistakes of the user, before anything is
    loaded."""
    with listen(settings) as sock:
        server = Server(settings, replace(engine, serving=True), make_engine, start_client)
        code = asyncio.run(server.run(sock))
    if num_busy := server.service.num_busy_threads:
        log.warning("ending although %d threads have not finished", num_busy)
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)  # a thread that comes back from a library while the interpreter goes down can abort the process
    return code


@contextlib.contextmanager
def listen(settings: Settings) -> Iterator[socket.socket]:
    """The socket, bound to the address. Clients may connect from now on; they are answered when the loop runs."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY on accepted connections only where the socket names its protocol. Without it the last
    # bytes of a reply wait for the client's delayed acknowledgement, about 40 ms.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((settings.host, settings.port))
            sock.listen()
        except OSError as error:
            raise OSError(
                f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
                "another server may be running there: choose another --port"
            ) from None
        yield sock


class Server:
    def __init__(self, settings: Settings, engine: EngineConfig, make_engine: str, start_client: StartClient) -> None:
        self.settings, self.engine, self.make_engine, self.start_client = settings, engine, make_engine, start_client
        self.max_connections = connection.max_connections(settings.max_connections, connection.raise_file_limit())
        self.service = Service(settings, engine, settings.served_model_name or (model_name(engine.model),))
        self.http = _Http(
            uvicorn.Config(
                traced(make_app(self.service)),
                http=partial(Connection, settings, self.max_connections, LimitedWarning()),  # type: ignore[arg-type]
                backlog=connection.ACCEPTED_AT_ONCE,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=settings.max_header_bytes,
                timeout_keep_alive=int(settings.keep_alive_timeout),
            )
        )
        self.client: Client | None = None
        self.socket_errors = LimitedWarning()
        self.signals: list[int] = []
        self.first_signal, self.second_signal = asyncio.Event(), asyncio.Event()
        self.deadline = float("inf")
        """time.monotonic() when the process must have ended."""
        self.stages: dict[str, float] = {}
        """When each stage of the start began."""
        self.address = ""

    async def run(self, sock: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        http = asyncio.create_task(self.http.serve(sockets=[sock]))
        self._log_address(sock)
        try:
            return await self._run()
        finally:
            self.http.config.timeout_graceful_shutdown = min(LAST_WRITES, self._left() / 2)  # type: ignore[assignment]
            self.http.should_exit = True
            await http
            if self.client is not None:
                await self.client.close(patience=self._left())
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _left(self) -> float:
        """Seconds until the deadline, for what is still to end."""
        return max(END / 2, self.deadline - time.monotonic())

    def _on_signal(self, number: int) -> None:
        self.signals.append(number)
        timeout = self.settings.shutdown_timeout if len(self.signals) == 1 else END
        self.deadline = min(self.deadline, time.monotonic() + timeout)
        (self.second_signal if self.first_signal.is_set() else self.first_signal).set()

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Errors outside of all tasks. Those of sockets come from clients and limits: few lines, no traceback."""
        error = context.get("exception")
        if isinstance(error, OSError):
            self.socket_errors.warn(f"{context.get('message')}: {error.strerror or error}")
        else:
            loop.default_exception_handler(context)

    async def _run(self) -> int:
        async with tasks(self._load(), self.first_signal.wait()) as (loading, signalled):
            await asyncio.wait((loading, signalled), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                log.info("%s while loading: ending", signal.Signals(self.signals[0]).name)
                self.service.leave("draining", "the server is shutting down")
                return 0
            try:
                client = self.client = loading.result()
            except (EngineDead, ValueError, OSError) as error:
                reason = error.reason if isinstance(error, EngineDead) else str(error)
                self.service.leave("dead", reason)
                print(f"anabranch serve: {reason}", file=sys.stderr)
                return 1
            return await self._serve(client, signalled)

    async def _load(self) -> Client:
        """Read the model folder's small files here, the weights in the engine's process."""
        self._on_stage(messages.Stage("reading the model folder"))
        loop, threads = asyncio.get_running_loop(), self.service.threads
        model = await loop.run_in_executor(threads, read_model, self.engine, self.settings)
        self._on_stage(messages.Stage("starting the engine's process"))
        client = await self.start_client(
            self.engine, self.make_engine, timeout=self.settings.start_timeout, on_stage=self._on_stage
        )
        self.stages["ready"] = time.monotonic()
        self.service.become_ready(model, client)
        self._log_ready()
        return client

    def _on_stage(self, stage: messages.Stage) -> None:
        self.stages.setdefault(stage.name, time.monotonic())
        if self.service.phase == "loading":
            part = f" {stage.done / stage.total:.0%}" if stage.total else ""
            self.service.reason = f"the model is loading ({stage.name}{part})"

    def _log_address(self, sock: socket.socket) -> None:
        host, port = sock.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        self.address = f"http://{'localhost' if host in ('0.0.0.0', '[::]') else host}:{port}"
        key = "key needed" if self.settings.api_key else "no key"
        log.info("listening on http://%s:%d (%s); model %s", host, port, key, ", ".join(self.service.names))

    def _log_ready(self) -> None:
        for (name, began), (_, ended) in pairwise(self.stages.items()):
            log.info("  %-30s %7.2f s", name, ended - began)
        total = self.stages["ready"] - min(self.stages.values())
        limits = f"body {self.service.max_body_bytes} bytes, headers {self.settings.max_header_bytes} bytes, "
        limits += f"{self.engine.max_num_seqs} sequences running and {self.settings.max_queue} waiting"
        log.info("limits: %s, %d connections", limits, self.max_connections)
        about = f"context {self.service.max_model_len} tokens, quantization {self.service.quantization}"
        log.info("ready after %.2f s; %s", total, about)
        log.info("open %s in a browser, or: %s", self.address, self._example())

    def _example(self) -> str:
        """A command that sends a request to this server."""
        route, body = "completions", '{"prompt": "Once upon a time", "max_tokens": 64}'
        if self.service.model.template.templates:
            route, body = "chat/completions", '{"messages": [{"role": "user", "content": "Tell me a story."}]}'
        key = " -H 'authorization: Bearer KEY'" if self.settings.api_key else ""
        return f"curl {self.address}/v1/{route}{key} -H 'content-type: application/json' -d '{body}'"

    async def _serve(self, client: Client, signalled: asyncio.Task[bool]) -> int:
        async with tasks(client.wait(), self._watch_steps(client), self._sample(client)) as (death, *_):
            await asyncio.wait((death, signalled), return_when=asyncio.FIRST_COMPLETED)
            return await (self._end_after_death(death.result()) if death.done() else self._drain(client, death))

    async def _drain(self, client: Client, death: asyncio.Task[str]) -> int:
        """Refuse new requests and let the running ones finish."""
        name, timeout = signal.Signals(self.signals[0]).name, self.settings.shutdown_timeout
        timeout, waiting = max(timeout - END, timeout / 2), self.service.num_admitted
        log.info("%s: %s", name, f"waiting up to {timeout:g} s for {waiting} sequences" if waiting else "ending")
        self.service.leave("draining", "the server is shutting down")
        async with tasks(self._until_idle(), self.second_signal.wait()) as (drained, again):
            await asyncio.wait((drained, again, death), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                return await self._end_after_death(death.result())
            if again.done():
                log.warning("a second signal: %d sequences are aborted", self.service.num_admitted)
            elif not drained.done():
                log.warning("not finished within %g s: %d sequences are aborted", timeout, self.service.num_admitted)
        self.service.cancel_work()
        await client.close(patience=self._left() / 2)  # sequences that still run end with an error
        return 128 + self.signals[1] if len(self.signals) > 1 else 0

    async def _until_idle(self) -> None:
        while self.service.num_admitted:
            await asyncio.sleep(0.02)

    async def _end_after_death(self, reason: str) -> int:
        """The engine has died: requests get an error with the reason, then this process ends too."""
        if self.service.phase == "dead":  # `_watch_steps` killed it
            reason = self.service.reason
        self.service.leave("dead", reason)
        log.error("%s; ending with exit code 1", reason)
        await asyncio.sleep(GRACE)
        return 1

    async def _watch_steps(self, client: Client) -> None:
        """Kill an engine whose step takes too long; then the server ends as after any death of the engine."""
        while True:
            await asyncio.sleep(WATCH)
            if client.hanging_for > self.settings.step_timeout:
                reason = f"the engine has been in one step for more than {self.settings.step_timeout:g} s"
                self.service.leave("dead", reason)
                log.error("%s: killing process %d", reason, client.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(client.pid, signal.SIGKILL)
                return

    async def _sample(self, client: Client) -> None:
        throughput = Throughput(time.monotonic())
        while True:
            await asyncio.sleep(INTERVAL)
            with contextlib.suppress(TimeoutError, RuntimeError):  # hanging or dead: handled elsewhere
                stats = await client.stats(timeout=10 * INTERVAL)
                self.service.history.add(stats)
                if fields := throughput.add(stats, time.monotonic()):
                    log.info("throughput", extra={"fields": fields})


class _Http(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Server: uvicorn would close the port before the drain."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)  # uvicorn has one number for this and for how many it accepts in a row


def read_model(engine: EngineConfig, settings: Settings) -> Model:
    """Read what the server needs from the model folder; ValueError if its files are wrong."""
    has_weights = engine.load_format != "dummy"
    folder = locate(engine.model, weights=has_weights)
    try:
        config = read_config(folder)
    except ValueError:  # packed weights: the platform's runner decides whether it can read them
        config = read_config(folder, quantized=True)
        has_weights = False
    if has_weights:
        # Headers only: an incomplete file is an error before a process is started.
        read_checkpoint(folder, quantized=bool(config.sources))
    template = ChatTemplate(folder, settings.chat_template)
    tokenizer = Tokenizer(folder)
    added = {token.content: id for id, token in tokenizer.backend.get_added_tokens_decoder().items()}
    sources = "\n".join(template.sources.values())
    parsers = find_parsers(sources, settings.tool_call_parser, settings.reasoning_parser, added_tokens=added)
    defaults = read_sampling_defaults(folder, engine.generation_config)
    return Model(config, tokenizer, template, parsers, defaults)


def model_name(model: str) -> str:
    """The name for clients: a hub id as it is, the last part of a folder's path."""
    return Path(model).resolve().name if Path(model).is_dir() else model
