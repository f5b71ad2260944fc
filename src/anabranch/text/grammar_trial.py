"""Tries grammars out in another process, where they can do no harm: how it is started, asked and ended.

The process is text/grammar_process.py. It is started with the first grammar, and again should it die. Several threads
may ask at once; each grammar has a child of its own there, so a bad one delays no other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress

from anabranch.text.grammar_process import Outcome, Trial, read_line

MODULE = "anabranch.text.grammar_process"
START_SECONDS = 60.0
"""For its imports and the tokenizer, which take about a second for a vocabulary of 150,000."""
GRACE_SECONDS = 30.0
"""Beyond a trial's own limit: then the process counts as hanging."""


class TrialProcess:
    def __init__(self, setup: bytes) -> None:
        self.control, theirs = socket.socketpair()
        # One heap for all threads: the reserves of several would count against a child's memory limit.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],  # nothing is imported from the current directory
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        self._end = weakref.finalize(self, _end, self.process, self.control)  # at exit, too
        self.control.settimeout(START_SECONDS)
        with suppress(OSError):  # it died: `wait_until_ready` says so
            self.control.sendall(setup)
        self._ready = False

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            refused = json.loads(read_line(self.control))
        except (OSError, EOFError) as error:
            raise ValueError(f"grammar: the process that tries grammars out did not start: {error!r}") from None
        if refused is not None:
            raise ValueError(f"grammar: the process that tries grammars out cannot use this tokenizer: {refused}")
        self._ready = True

    def run(self, trial: Trial) -> Outcome | None:
        """None: the process died or hangs."""
        mine, theirs = socket.socketpair()
        with mine:
            mine.settimeout(trial["wall_seconds"] + GRACE_SECONDS)
            try:
                with theirs:
                    socket.send_fds(self.control, [b"\0"], [theirs.fileno()])
                mine.sendall(json.dumps(trial).encode() + b"\n")
                outcome: Outcome = json.loads(read_line(mine))
            except (OSError, EOFError):
                return None
        return outcome

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Its children end with it: Linux kills them, and elsewhere their timers do."""
    control.close()
    process.kill()
    process.wait()


class GrammarTrial:
    """For one tokenizer."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Starts the process without waiting for it. `tokenizer`: the text of a tokenizer.json."""
        setup = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_ids": list(eos_ids)}
        self._setup = json.dumps(setup).encode() + b"\n"
        self._lock = threading.Lock()
        self._closed = False
        self._process: TrialProcess | None = TrialProcess(self._setup)

    def run(self, trial: Trial) -> Outcome:
        """How it went; ValueError if it cannot be tried."""
        for _ in range(2):
            process = self._running()
            outcome = process.run(trial)
            if outcome is not None:
                return outcome
            self._drop(process)
        raise ValueError("grammar: the process that tries grammars out died twice")

    def _running(self) -> TrialProcess:
        with self._lock:
            if self._closed:
                raise ValueError("grammar: the engine is being closed")
            if self._process is None:
                self._process = TrialProcess(self._setup)
            if self._closed:  # meanwhile, and `close` saw no process
                self._process.close()
                raise ValueError("grammar: the engine is being closed")
            try:
                self._process.wait_until_ready()
            except ValueError:
                self._process.close()
                self._process = None
                raise
            return self._process

    def _drop(self, process: TrialProcess) -> None:
        with self._lock:
            if self._process is process:
                process.close()
                self._process = None

    def close(self) -> None:
        self._closed = True
        if (process := self._process) is not None:  # without the lock: whoever has it may be waiting for the process
            process.close()


def exceeded(trial: Trial, outcome: Outcome) -> str:
    """Which limit a trial died of, as the end of a sentence about the grammar."""
    if outcome["signal"] in (signal.SIGPROF, signal.SIGALRM):
        return f"is too complex: not compiled within {trial['seconds']:g} seconds"
    if outcome["signal"] in (signal.SIGSEGV, signal.SIGBUS):
        return "is nested too deeply"
    return f"is too complex: it needs more than {trial['memory'] >> 20} MiB of memory"
