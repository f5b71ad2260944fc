"""The engine's process seen from the server: requests in, streams of updates out, on one asyncio loop.

Knows messages and the process that sends them, not text or HTTP. A stream holds at most one Update: while its consumer
is slow, later ones are merged into it, so it delays no other stream and grows by its tokens only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from anabranch import messages
from anabranch.config import EngineConfig
from anabranch.engine.process import FLUSH_SECONDS, EngineProcess
from anabranch.engine.worker import HEARTBEAT, address
from anabranch.processes import Silence, exit_text
from anabranch.request import Request, Update

log = logging.getLogger(__name__)

MAX_UNREAD = 4096  # messages sent that the engine has not read
MAX_READ = 64  # messages read before other tasks of the loop run
STOP_SECONDS = 6.0  # for an orderly end, before the kill; more than the worker's own limit


class EngineDead(RuntimeError):
    """The engine's process has ended. `reason` is one line; the message adds the end of its stderr."""

    def __init__(self, reason: str, exit_code: int | None = None, stderr: str = "") -> None:
        self.reason, self.exit_code, self.stderr = reason, exit_code, stderr
        super().__init__(reason + (f"\nits last lines:\n{stderr}" if stderr else ""))


class EngineBusy(RuntimeError):
    """Too many messages are waiting for the engine: try again later."""


@dataclass(slots=True, eq=False)
class Stream:
    """One request's updates for its consumer."""

    number: int  # of its Add among the messages sent
    pending: Update | None = None
    waiter: asyncio.Future[None] | None = None
    ended: bool = False  # no more updates will come

    def put(self, update: Update) -> None:
        if self.pending is None:
            self.pending = update
        else:
            merge(self.pending, update)
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


def merge(into: Update, later: Update) -> None:
    """Add a later update of the same request to an earlier one."""
    into.token_ids += later.token_ids
    into.logprobs += later.logprobs
    into.num_cached = max(into.num_cached, later.num_cached)
    for name in ("prompt_logprobs", "finish_reason", "stop_token", "error", "routed_experts", "embedding"):
        if (value := getattr(later, name)) is not None:
            setattr(into, name, value)


class EngineClient:
    """Make it with `start`, end it with `close`; all from one loop's thread."""

    num_engines = 1

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams: dict[str, Stream] = {}
        self._tickets: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._drained, self._closed = asyncio.Event(), asyncio.Event()
        self._on_stage: Callable[[messages.Stage], None] | None = None
        self._stage = "starting"
        self._closing = False
        self._ended: messages.Ended | None = None
        self._exit_code: int | None = None
        self._num_sent = self._num_read = self._num_tickets = 0
        self._connecting = {"main", "pulse"}  # threads of the worker that have not sent anything yet
        self._step_began: float | None = None
        self._silence = Silence(self._loop, self._on_silence)
        self.ready_stats: dict[str, Any] = {}
        """The engine's stats at the start, max_model_len among them."""
        self.last_heartbeat: float | None = None
        """time.monotonic() of it."""
        self.num_steps = 0

        self._process = EngineProcess(self._on_exit)
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.bind(address(self._process.folder, "reports"))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set(zmq.SNDHWM, 0)  # _send counts: see MAX_UNREAD
        self._outbox.set(zmq.RECONNECT_IVL, 10)  # ms, until the worker has bound its end
        self._outbox.connect(address(self._process.folder, "commands"))
        self._fd = int(self._inbox.get(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)  # the descriptor is edge-triggered

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        engine: str = "anabranch.engine.engine:make_engine",
        *,
        timeout: float = 1800.0,
        on_stage: Callable[[messages.Stage], None] | None = None,
    ) -> EngineClient:
        """Start the process and wait until it is ready; EngineDead with its one-line error if it fails to start."""
        client = cls()
        client._on_stage = on_stage
        try:
            client._send(messages.Start(engine, config, logging.getLogger().getEffectiveLevel()))
            async with asyncio.timeout(timeout):
                client.ready_stats = await asyncio.shield(client._ready)
        except TimeoutError:
            await client._kill()
            raise EngineDead(f"the engine was not ready within {timeout:g} s; it was {client._stage}") from None
        except BaseException:
            await client._kill()
            raise
        return client

    # -- for the server ------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> AsyncGenerator[Update, None]:
        """The request's updates until the one with a finish_reason.

        Leaving early aborts the request in the engine: at once if the generator is closed (`contextlib.aclosing`) or
        the task that waits in it is cancelled, else when it is collected. EngineDead if the process ends, EngineBusy if
        it reads no messages, ValueError if the request cannot be sent; an error of the engine's own is an Update.
        """
        stream = self._open(request)
        try:
            while True:
                while stream.pending is None:
                    if stream.ended:
                        raise self._error()
                    stream.waiter = self._loop.create_future()
                    await stream.waiter
                update, stream.pending = stream.pending, None
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            if self._streams.get(request.id) is stream:
                self._forget(request.id)
                self._send(messages.Abort(request.id))

    async def abort(self, id: str) -> None:
        """End a request; its stream gets a last update with finish_reason "abort". Unknown ids are ignored."""
        stream = self._streams.get(id)
        if stream is not None:
            self._forget(id)
            self._send(messages.Abort(id))
            stream.put(Update(id=id, finish_reason="abort"))

    async def stats(self, timeout: float = 10.0, rebalance: bool = False) -> dict[str, Any]:
        """The engine's numbers; TimeoutError if it does not answer in time. `rebalance`: experts are divided anew among
        ranks before that; RuntimeError where they do not move."""
        self._check_open()
        self._num_tickets += 1
        ticket = self._num_tickets
        future = self._tickets[ticket] = self._loop.create_future()
        try:
            self._send(messages.AskStats(ticket, rebalance))
            async with asyncio.timeout(timeout):
                return await future
        finally:
            del self._tickets[ticket]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def alive(self) -> bool:
        """The process runs and its engine has not failed."""
        return self._exit_code is None and self._ended is None

    @property
    def dead_reason(self) -> str | None:
        return None if self.alive else self._error().reason

    @property
    def hanging_for(self) -> float:
        """Seconds the running step has taken, or since the last heartbeat if those have stopped; exact to one beat. A
        healthy engine stays below its longest step; 0 if it has ended."""
        if not self.alive or self.last_heartbeat is None:
            return 0.0
        now = time.monotonic()
        if self._step_began is not None:
            return now - self._step_began
        age = now - self.last_heartbeat
        return age if age > 3 * HEARTBEAT else 0.0

    async def wait(self) -> str:
        """Wait until the process has ended; returns the reason."""
        await self._closed.wait()
        return self._error().reason

    async def close(self, drain: bool = False, timeout: float = 30.0, patience: float = STOP_SECONDS) -> None:
        """End the engine; with `drain`, requests in flight may finish within `timeout` seconds. New ones are refused.
        What is left is aborted; a process that has not ended by itself after `patience` seconds is killed."""
        self._closing = True
        if drain and self._streams:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._drained.wait()
        for id in list(self._streams):
            await self.abort(id)
        if not self._closed.is_set():
            self._send(messages.Stop())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(patience, STOP_SECONDS)):
                    await self._closed.wait()
        await self._kill()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self.alive:
            raise self._error()
        if self._num_sent - self._num_read >= MAX_UNREAD:
            raise EngineBusy(f"{MAX_UNREAD} messages are waiting for the engine: try again later")

    def _open(self, request: Request) -> Stream:
        self._check_open()
        if self._closing:
            raise self._error()
        if request.id in self._streams:
            raise ValueError(f"request id {request.id!r} is in use")
        try:
            self._send(messages.Add(request))
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"request {request.id!r} cannot be sent: {error}") from error
        stream = self._streams[request.id] = Stream(self._num_sent)
        self._drained.clear()
        return stream

    def _forget(self, id: str) -> None:
        del self._streams[id]
        if not self._streams:
            self._drained.set()

    def _send(self, message: messages.Command) -> None:
        """Never blocks. Adds and AskStats are limited by MAX_UNREAD, and there are no more aborts than adds."""
        if not self._outbox.closed:
            self._outbox.send(messages.encode(message), zmq.NOBLOCK)
            self._num_sent += 1

    def _read(self) -> None:
        for _ in range(MAX_READ):
            if self._inbox.closed:
                return
            try:
                frame = self._inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = messages.decode_report(frame)
            except msgspec.MsgspecError as error:
                log.error("a message of %d bytes is dropped: %s", len(frame), error)
                continue
            if isinstance(message, messages.Updates):
                self._deliver(message)
            else:
                self._note(message)
        self._loop.call_soon(self._read)

    def _deliver(self, message: messages.Updates) -> None:
        self._step_began = None
        num_received = message.num_received
        self._num_read = max(self._num_read, num_received)
        streams = self._streams
        for update in message.updates:
            stream = streams.get(update.id)
            if stream is None or num_received < stream.number:  # aborted, or an earlier request with this id
                continue
            if update.finish_reason is not None:
                self._forget(update.id)
            stream.put(update)

    def _note(self, message: messages.Report) -> None:
        if isinstance(message, messages.Heartbeat):
            self.last_heartbeat = now = time.monotonic()
            self._step_began = None if message.step_for is None else now - message.step_for
            self._num_read = max(self._num_read, message.num_received)
            self.num_steps = message.num_steps
            self._silence.broken(message.patience)
            self._connected("pulse")
        elif isinstance(message, messages.Stats):
            future = self._tickets.get(message.ticket)
            if future is not None and not future.done():
                if message.error is None:
                    future.set_result(message.values)
                else:
                    future.set_exception(RuntimeError(f"the engine's stats: {message.error}"))
        elif isinstance(message, messages.Stage):
            self._stage = message.name
            self._connected("main")
            if self._on_stage is not None:
                self._loop.call_soon(self._on_stage, message)  # an error there does not end _read
        elif isinstance(message, messages.Ready):
            if not self._ready.done():
                self._ready.set_result(message.stats)
        elif isinstance(message, messages.Ended):
            self._ended = message
            if self._exit_code is not None:
                self._shut_down()

    def _connected(self, thread: str) -> None:
        """Once all connections are made, remove the sockets' names, so that no exit leaves them in the file system."""
        if thread in self._connecting:
            self._connecting.remove(thread)
            if not self._connecting:
                self._process.remove_folder()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _on_exit(self, code: int) -> None:
        """Called in the process's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._exited, code)

    def _exited(self, code: int) -> None:
        self._exit_code = code
        self._read()
        if self._ended is None:
            self._loop.call_later(FLUSH_SECONDS, self._shut_down)
        else:
            self._shut_down()

    def _shut_down(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._loop.remove_reader(self._fd)
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        self._context.term()
        self._process.remove_folder()
        for id, stream in list(self._streams.items()):
            stream.ended = True
            stream.wake()
            self._forget(id)
        for future in (*self._tickets.values(), self._ready):
            if not future.done():
                future.set_exception(self._error())
        if self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # read once, or asyncio logs it after a timeout; it is in dead_reason

    def _on_silence(self, reason: str) -> None:
        if self.alive:
            log.error("%s: killing process %d", reason, self.pid)
            self._ended = messages.Ended(reason)
            self._process.kill()

    async def _kill(self) -> None:
        """Kill the process if it still runs."""
        self._closing = True
        self._process.kill()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._closed.wait()
        except TimeoutError:
            log.error("process %d does not end after SIGKILL", self.pid)

    def _error(self) -> EngineDead:
        if self._ended is not None and self._ended.error is not None:
            reason = f"the engine failed: {self._ended.error}"
        elif self._closing:
            return EngineDead("the engine is closed" if self._closed.is_set() else "the engine is closing")
        else:
            reason = exit_text(self._exit_code)
        return EngineDead(reason, self._exit_code, "\n".join(self._process.last_lines))
