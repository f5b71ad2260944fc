"""Tries grammars out in another process before the engine compiles them: the engine's end, and the process itself.

llguidance recurses without a bound, cannot be interrupted and may take any amount of memory. So each grammar is first
compiled in a child of the process `python -m anabranch.text.grammar_process`: a child with limits on time, memory and
stack, which may die of them. Only a grammar that survives is compiled again in the engine (text/grammar.py). The
process has llguidance and the tokenizer loaded, but neither torch nor a device; it ends when the engine closes its
socket or dies, and is started again if it dies itself.

Its standard input is a socket. First the engine sends a line of JSON with the tokenizer; the answer is a line: null, or
why it cannot be used. Then it sends one byte for each grammar, with a socket attached: over that it sends a line
of JSON with a Trial, and the answer is a line with the Outcome.
"""

import gc
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn, TypedDict, TypeVar

from anabranch.processes import die_with
from anabranch.text.grammar_source import make_source

T = TypeVar("T")

START_SECONDS = 60.0
"""For the process's imports and the tokenizer, which take about a second for a vocabulary of 150,000."""
GRACE_SECONDS = 30.0
"""Beyond a trial's own limit: after that the process counts as hanging."""
NUM_STEPS = 8
"""Tokens that a trial generates: only then some grammars show how much they take."""
COMPILE_STACK = 8 << 20
STEP_STACK = 1 << 20
"""Less than the 2 MiB of the threads that compute masks in the engine."""
QUICK_SECONDS = 0.2
SLOW_PRIORITY = 5
"""Of a child that takes longer than that: it must not delay others."""

# What a grammar may cost. llguidance's own limits hold a step to tens of milliseconds; those on compilation and on
# states (1-2 kB each) are made tighter here, because grammars within its defaults take seconds and hundreds of MB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,
    "max_grammar_size": 30_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}


class Trial(TypedDict):
    kind: str
    text: str
    open_objects: bool
    """The grammar, see grammar_source.make_source."""
    seconds: float
    """Of processor time."""
    wall_seconds: float
    memory: int
    """Bytes that the child may take in addition to what it was forked with."""


class Outcome(TypedDict):
    source: str
    """The grammar in llguidance's own form."""
    error: str | None
    """Why the grammar cannot be used."""
    signal: int
    """That ended the child, or 0."""
    memory: int
    """Bytes the grammar took."""


def make_matcher(tokenizer: Any, source: str) -> Any:
    """Compile a grammar and compute its first mask; llguidance's `is_error` tells whether that worked."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    matcher.compute_bitmask()  # some grammars show only here that they are too large
    return matcher


def reason(matcher: Any) -> str:
    text: str = matcher.get_error()
    return text.replace("<non-verbose/>", "").strip()


def with_stack(stack: int, work: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread with a stack of this size."""
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _stack_size:  # it is a setting of the whole process
            before = threading.stack_size(stack)
            try:
                future = pool.submit(work, *arguments)
            finally:
                threading.stack_size(before)
        return future.result()


_stack_size = threading.Lock()


def send(target: socket.socket, value: object) -> None:
    target.sendall(json.dumps(value).encode() + b"\n")


def receive(source: socket.socket) -> Any:
    """The one line that the other end sends before it waits for an answer."""
    with source.makefile("rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return json.loads(line)


# -- in the engine -----------------------------------------------------------------------------------------------------


class TrialProcess:
    def __init__(self, setup: object) -> None:
        self.control, theirs = socket.socketpair()
        # One heap for all threads: the reserves of several would count against a child's memory limit.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MALLOC_ARENA_MAX": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "anabranch.text.grammar_process"],  # -P: not from the current directory
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        self.close = weakref.finalize(self, _end, self.process, self.control)  # at exit, too
        self.control.settimeout(START_SECONDS)
        with suppress(OSError):  # it died: `wait_until_ready` reports that
            send(self.control, setup)
        self._ready = False

    def wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            refused = receive(self.control)
        except (OSError, EOFError) as error:
            raise ValueError(f"grammar: the process that tries grammars out did not start: {error!r}") from None
        if refused is not None:
            raise ValueError(f"grammar: the process that tries grammars out cannot use this tokenizer: {refused}")
        self._ready = True

    def run(self, trial: Trial, mine: socket.socket, theirs: socket.socket) -> Outcome:
        """The outcome, by way of a pair of sockets, which are closed. OSError or EOFError: the process died or
        hangs."""
        with mine:
            mine.settimeout(trial["wall_seconds"] + GRACE_SECONDS)
            with theirs:
                socket.send_fds(self.control, [b"\0"], [theirs.fileno()])
            send(mine, trial)
            outcome: Outcome = receive(mine)
        return outcome


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    """Its children end with it: Linux kills them, and elsewhere their timers do."""
    control.close()
    process.kill()
    process.wait()


class GrammarTrial:
    """Tries grammars out for one tokenizer. Threads may share it: a bad grammar delays no other."""

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Starts the process without waiting for it. `tokenizer`: the text of a tokenizer.json."""
        self._setup = {"tokenizer": tokenizer, "vocab_size": vocab_size, "eos_ids": list(eos_ids)}
        self._lock = threading.Lock()
        self._closed = False
        self._process: TrialProcess | None = TrialProcess(self._setup)

    def run(self, trial: Trial) -> Outcome:
        """The outcome; ValueError if the grammar cannot be tried."""
        for _ in range(2):
            process = self._running()
            pair = socket.socketpair()  # where it fails, this process lacks descriptors, and that one is fine
            try:
                return process.run(trial, *pair)
            except (OSError, EOFError):  # it died or hangs
                with self._lock:
                    self._drop(process)
        raise ValueError("grammar: the process that tries grammars out died twice")

    def _running(self) -> TrialProcess:
        with self._lock:
            if self._process is None and not self._closed:
                self._process = TrialProcess(self._setup)
            process = self._process
            try:
                if process is None or self._closed:  # `close` may have run while the process was started
                    raise ValueError("grammar: the engine is being closed")
                process.wait_until_ready()
            except ValueError:
                self._drop(process)
                raise
            return process

    def _drop(self, process: TrialProcess | None) -> None:
        if process is not None and self._process is process:
            process.close()
            self._process = None

    def close(self) -> None:
        self._closed = True
        if (process := self._process) is not None:  # without the lock: its owner may be waiting for the process
            process.close()


def exceeded(trial: Trial, outcome: Outcome) -> str:
    """Which limit ended a trial, as the end of a sentence about the grammar."""
    if outcome["signal"] in (signal.SIGPROF, signal.SIGALRM):
        return f"is too complex: not compiled within {trial['seconds']:g} seconds"
    if outcome["signal"] in (signal.SIGSEGV, signal.SIGBUS):
        return "is nested too deeply"
    return f"is too complex: it needs more than {trial['memory'] >> 20} MiB of memory"


# -- in a child of the process -----------------------------------------------------------------------------------------


def try_out(tokenizer: Any, connection: socket.socket, pipe: int, parent: int) -> NoReturn:
    """Compile one grammar within its limits and write the outcome to `pipe`."""
    outcome = Outcome(source="", error=None, signal=0, memory=0)
    try:
        die_with(parent)
        signal.setitimer(signal.ITIMER_REAL, 60)  # for a client that sends nothing
        trial: Trial = receive(connection)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # last messages of native code
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory(trial["memory"])
        signal.setitimer(signal.ITIMER_REAL, trial["wall_seconds"])
        signal.setitimer(signal.ITIMER_PROF, trial["seconds"])  # both end the process: it has no handlers
        before = peak_memory()
        outcome["source"] = make_source(trial["kind"], trial["text"], trial["open_objects"])
        matcher = with_stack(COMPILE_STACK, make_matcher, tokenizer, outcome["source"])
        if matcher.is_error():
            outcome["error"] = f"{trial['kind']} cannot be used: {reason(matcher)}"
        else:
            with_stack(STEP_STACK, walk, matcher)
        outcome["memory"] = max(0, peak_memory() - before)
    except MemoryError:
        os._exit(1)
    except Exception as failure:
        outcome["error"] = str(failure) if isinstance(failure, ValueError) else f"{type(failure).__name__}: {failure}"
    with open(pipe, "wb") as file:
        file.write(json.dumps(outcome).encode())
    os._exit(0)  # no destructors: they belong to the parent


def limit_memory(extra: int) -> None:
    if sys.platform != "linux":  # the limit counts what was reserved before, which elsewhere is not known
        return
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra + COMPILE_STACK + STEP_STACK
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def walk(matcher: Any) -> None:
    """Generate some tokens that the grammar allows."""
    choose = random.Random(0)
    for _ in range(NUM_STEPS):
        if matcher.is_stopped():
            return
        mask: bytes = matcher.compute_bitmask()
        begin = choose.randrange(len(mask))
        place = next((i for i in (*range(begin, len(mask)), *range(begin)) if mask[i]), None)
        if place is None:
            return
        matcher.consume_token(8 * place + choose.choice([bit for bit in range(8) if mask[place] >> bit & 1]))


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(control: socket.socket, tokenizer: Any) -> None:
    running: dict[int, tuple[int, socket.socket]] = {}  # pipe → child, the connection that waits for its outcome
    quick: dict[int, float] = {}  # child → when it counts as slow
    while True:
        wait = max(0.0, min(quick.values()) - time.monotonic()) if quick else None
        found = select.select([control.fileno(), *running], [], [], wait)[0]
        for child in [child for child, end in quick.items() if end <= time.monotonic()]:
            del quick[child]
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, child, SLOW_PRIORITY)
        for ready in found:
            if ready == control.fileno():
                byte, descriptors, _, _ = socket.recv_fds(control, 1, 1)
                if not byte:
                    for child, _ in running.values():
                        os.kill(child, signal.SIGKILL)
                    return
                for descriptor in descriptors:
                    connection = socket.socket(fileno=descriptor)
                    pipe, child = fork(tokenizer, connection)
                    running[pipe] = child, connection
                    quick[child] = time.monotonic() + QUICK_SECONDS
            else:
                child, connection = running.pop(ready)
                quick.pop(child, None)
                with connection, suppress(OSError):  # the engine no longer waits
                    send(connection, read_outcome(ready, child))


def fork(tokenizer: Any, connection: socket.socket) -> tuple[int, int]:
    pipe, other = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(pipe)
        try_out(tokenizer, connection, other, parent)
    os.close(other)
    return pipe, child


def read_outcome(pipe: int, child: int) -> Outcome:
    """Of a child that has written or died."""
    with open(pipe, "rb") as file:
        written = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        return json.loads(written)
    return Outcome(source="", error=None, signal=-code if code < 0 else signal.SIGABRT, memory=0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine's parent to decide
    control = socket.socket(fileno=os.dup(0))
    try:
        setup = receive(control)
    except EOFError:
        return
    refused = None
    try:
        import llguidance

        tokenizer = llguidance.LLTokenizer(setup["tokenizer"], n_vocab=setup["vocab_size"], eos_token=setup["eos_ids"])
    except Exception as error:
        tokenizer, refused = None, f"{type(error).__name__}: {error}"
    del setup
    with suppress(ConnectionError):  # the engine has gone; the children go with this process
        send(control, refused)
        if refused is None:
            gc.freeze()  # children that collect garbage would copy every page
            gc.disable()
            serve(control, tokenizer)


if __name__ == "__main__":
    main()
