"""The engine in a process of its own: reads messages, runs steps, sends updates. `python -m anabranch.engine.worker`.

Knows the engine by its public methods and its client by two sockets, each bound by the side that reads it, in a private
folder. The process ends with its parent and after its engine failed, and answers every request it accepted.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from pkgutil import resolve_name
from types import FrameType
from typing import TYPE_CHECKING, Any

import zmq

from anabranch import logs, messages, processes
from anabranch.kernels.compiling import compile_server
from anabranch.request import Request, Update
from anabranch.stages import Stages

if TYPE_CHECKING:
    from anabranch.engine.engine import Engine

log = logging.getLogger("anabranch.engine.worker")  # __name__ is __main__ here

HEARTBEAT = 0.5  # seconds between two heartbeats
IDLE_MS = 100  # how often an idle engine checks for a SIGTERM
QUIET = 0.25
"""Seconds without a step after which Engine.idle is called, once. It may take as long, and a request that arrives
meanwhile waits; under load gaps between requests are shorter, so that none does."""
MAX_STEPS_AHEAD = 1000  # unread messages after which the engine waits for the client
FLUSH_MS = 2000  # for the client to read what was sent before the exit
FAIL_SECONDS = 2.0  # for a step to fail whose ranks have ended; after these the process ends without it
EXIT_SECONDS = 5.0  # after these the exit is forced
PROGRESS = 0.1  # seconds between two reports of the same stage
STAGES = {"import": "importing", "config": "loading", "weights": "loading", "tune": "tuning"}
STAGES |= {"allocate": "loading", "compile": "compiling", "capture": "capturing"}
"""Names of a start's stages, as sent to the client."""


def address(folder: Path, inbox: str) -> str:
    return f"ipc://{folder / inbox}"


class Pulse(threading.Thread):
    """Sends heartbeats, also during a long step, so that a client can tell a hanging engine from one that has ended."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, parent: int) -> None:
        super().__init__(name="pulse", daemon=True)
        self.context, self.folder, self.parent = context, folder, parent
        self.ending = threading.Event()
        self.num_received = 0
        self.num_steps = 0
        self.step_began: float | None = None
        self.engine: Engine | None = None

    def run(self) -> None:
        socket = self.context.socket(zmq.PUSH)  # sockets belong to one thread
        socket.set(zmq.SNDHWM, 2)
        socket.connect(address(self.folder, "reports"))
        while True:
            began = self.step_began
            step_for = None if began is None else time.monotonic() - began
            beat = messages.Heartbeat(self.num_received, self.num_steps, step_for, processes.patience)
            with contextlib.suppress(zmq.Again):  # the client has not read the last ones
                socket.send(messages.encode(beat), zmq.NOBLOCK)
            if self.ending.wait(HEARTBEAT):
                break
            if self.engine is not None and (failure := self.engine.failure):
                if self.ending.wait(FAIL_SECONDS):
                    break
                with contextlib.suppress(zmq.Again):
                    socket.send(messages.encode(messages.Ended(f"RuntimeError: {failure}")), zmq.NOBLOCK)
                time.sleep(HEARTBEAT)  # for the client to read it
                os._exit(1)
            if os.getppid() != self.parent:
                os._exit(1)
        socket.close(linger=0)


class Worker:
    def __init__(self, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes], pulse: Pulse) -> None:
        self.inbox, self.outbox, self.pulse = inbox, outbox, pulse
        self.engine: Engine | None = None
        self.running: dict[str, None] = {}  # ids in the engine, in order of arrival
        self.updates: list[Update] = []  # not sent yet
        self.stopping = False
        self.quiet_since = 0.0
        self.stage_at = 0.0
        self.shown_stages: set[str] = set()
        self.stages = Stages.of_process(self._begin_stage)

    def run(self) -> int:
        """Start, serve, stop; returns the exit code."""
        try:
            engine = self._start()
        except Exception as error:
            log.error(
                "the engine cannot start: %s", one_line(error), exc_info=not isinstance(error, ValueError | OSError)
            )
            self._send(messages.Ended(one_line(error)))
            return 1
        try:
            while not self.stopping:
                came = self._take(engine, IDLE_MS if not engine.has_work else 0)
                if engine.has_work and not self.stopping:
                    self._step(engine)
                elif not came and time.monotonic() - self.quiet_since >= QUIET:
                    engine.idle()
                    self.quiet_since = time.monotonic()
                self._send_updates()
        except Exception as error:
            self._fail(error)
            return 1
        self._stop(engine)
        return 0

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
        if self.engine is None:  # loading may take minutes, and there are no requests yet
            # Raised inside some library's callback it would be swallowed: the alarm raises it again until it gets out.
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            raise SystemExit(128 + signal.SIGTERM)

    # -- start and end -------------------------------------------------------------------------------------------------

    def _start(self) -> Engine:
        self.inbox.poll()
        frame = self.inbox.recv()
        self.pulse.num_received += 1
        start = messages.decode_command(frame)
        if not isinstance(start, messages.Start):
            raise ValueError(f"the first message must be Start, not {type(start).__name__}")
        logging.getLogger().setLevel(start.log_level)
        with self.stages.shared():
            compile_server.start_early()
            with self.stages("import"):
                make_engine = resolve_name(start.engine)
            self._begin_stage("weights")
            self.engine = engine = make_engine(start.config, self._progress)
        compile_server.close()
        gc.freeze()  # these objects stay: no need to search them for garbage while requests wait
        self.stages.finish()
        self.pulse.engine = engine
        log.debug("start-up:\n%s", self.stages.table())  # the server logs its own, with these in it
        self._send(messages.Ready(self._stats(engine)))
        return engine

    def _begin_stage(self, name: str) -> None:
        shown = STAGES.get(name, name)
        if shown not in self.shown_stages:  # some imports come late: no stage is shown twice
            self.shown_stages.add(shown)
            self._send(messages.Stage(shown))

    def _stats(self, engine: Engine) -> dict[str, Any]:
        return {**engine.stats(), "startup": self.stages.as_dict()}

    def _progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.stage_at >= PROGRESS or done == total:
            self.stage_at = now
            self._send(messages.Stage("loading", done, total))

    def _fail(self, error: Exception) -> None:
        """The engine's state is unknown now: answer all requests and end."""
        known = self.engine is not None and self.engine.failure  # a rank has ended: the log has a line that names it
        log.error("the engine failed with %d requests in flight", len(self.running), exc_info=None if known else error)
        self.stopping = True
        text = messages.INTERNAL + one_line(error)
        refused = [update for update in self.updates if update.id not in self.running]
        self.updates = refused + [Update(id=id, finish_reason="error", error=text) for id in self.running]
        self._send_updates()
        self._send(messages.Ended(one_line(error)))

    def _stop(self, engine: Engine) -> None:
        try:
            self._send_updates()
            for id in self.running:
                engine.abort(id)
                self.updates.append(Update(id=id, finish_reason="abort"))
            self._send_updates()
            engine.close()
        except Exception:
            log.exception("while closing the engine")
        self._send(messages.Ended())

    # -- serving -------------------------------------------------------------------------------------------------------

    def _take(self, engine: Engine, wait_ms: int) -> bool:
        """Read all messages, waiting up to wait_ms for the first. False: there was none."""
        if not self.inbox.poll(wait_ms):
            return False
        while True:
            try:
                frame = self.inbox.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self.pulse.num_received += 1
            try:
                message = messages.decode_command(frame)
            except Exception as error:
                log.error("a message of %d bytes is dropped: %s", len(frame), one_line(error))
                if (id := messages.request_id(frame)) is not None:
                    self.updates.append(Update(id=id, finish_reason="error", error=one_line(error)))
                continue
            if isinstance(message, messages.Add):
                self._add(engine, message.request)
            elif isinstance(message, messages.Abort):
                self.running.pop(message.id, None)
                engine.abort(message.id)
            elif isinstance(message, messages.AskStats):
                self._send_stats(engine, message)
            elif isinstance(message, messages.Stop):
                self.stopping = True
            else:
                log.error("a second Start is dropped")

    def _add(self, engine: Engine, request: Request) -> None:
        try:
            engine.add(request)
        except ValueError as error:
            self.updates.append(Update(id=request.id, finish_reason="error", error=one_line(error)))
        except Exception as error:
            log.exception("request %s", request.id)
            self.updates.append(Update(id=request.id, finish_reason="error", error=messages.INTERNAL + one_line(error)))
        else:
            self.running[request.id] = None

    def _send_stats(self, engine: Engine, asked: messages.AskStats) -> None:
        try:
            if asked.rebalance:
                engine.rebalance()
            self._send(messages.Stats(asked.ticket, self._stats(engine)))
        except Exception as error:
            if not isinstance(error, ValueError):
                log.exception("stats")
            self._send(messages.Stats(asked.ticket, {}, one_line(error)))

    def _step(self, engine: Engine) -> None:
        pulse = self.pulse
        pulse.step_began = time.monotonic()
        updates = engine.step()
        pulse.step_began, self.quiet_since = None, time.monotonic()
        pulse.num_steps += 1
        self.updates += updates

    def _send_updates(self) -> None:
        if not self.updates:
            return
        self._send(messages.Updates(self.updates, self.pulse.num_received))
        for update in self.updates:
            if update.finish_reason is not None:  # only now: what could not be sent still needs an answer
                self.running.pop(update.id, None)
        self.updates = []

    def _send(self, message: messages.Report) -> None:
        frame = messages.encode(message)
        while not self.outbox.poll(IDLE_MS, zmq.POLLOUT):  # the client has not read many messages: wait for it
            if self.stopping:
                return
        self.outbox.send(frame)


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:2000]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


# -- the process -------------------------------------------------------------------------------------------------------


def watch_stdin() -> None:
    """The parent holds the other end and writes nothing: end of file means that it has ended. Where `die_with` does
    nothing, this ends the process, and Pulse if a sibling process holds the other end of stdin too."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(folder: Path, parent: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    processes.die_with(parent)
    threading.Thread(target=watch_stdin, name="watch-stdin", daemon=True).start()
    logs.set_up(level=logging.WARNING)  # until Start brings the parent's level

    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    outbox.set(zmq.SNDHWM, MAX_STEPS_AHEAD)
    inbox.bind(address(folder, "commands"))
    outbox.connect(address(folder, "reports"))
    pulse = Pulse(context, folder, parent)
    pulse.start()
    worker = Worker(inbox, outbox, pulse)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, worker.on_sigterm)
    try:
        code = worker.run()
    except SystemExit as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        code = error.code if isinstance(error.code, int) and error.code else 1
        text = "stopped by SIGTERM while starting" if worker.stopping else "something called exit()"
        outbox.send(messages.encode(messages.Ended(text)), zmq.NOBLOCK)

    guard = threading.Timer(EXIT_SECONDS, os._exit, (code or 1,))
    guard.daemon = True
    guard.start()
    pulse.ending.set()
    pulse.join()
    inbox.close(linger=0)
    outbox.close(linger=FLUSH_MS)
    context.term()
    if code != 0:
        logging.shutdown()
        os._exit(code)  # whatever failed may also block an orderly exit
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
