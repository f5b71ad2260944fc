"""The process that tries grammars out before the engine compiles them: `python -m anabranch.text.grammar_process`.

llguidance recurses without a bound, cannot be interrupted and may take any amount of memory. So each grammar is first
compiled in a child of this process, which has limits on time, memory and stack and may die of them. Only a grammar that
survives is compiled again in the engine (text/grammar.py). This process has llguidance and the tokenizer loaded, but
neither torch nor a device; it ends when the engine closes its socket or dies. Its other end is grammar_trial.py.

Standard input is a socket. First a line of JSON with the tokenizer; the answer is a line: null, or why it cannot be
used. Then one byte for each grammar, with a socket attached: there the grammar comes as a line of JSON (a Trial), and a
line with the Outcome is the answer.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import resource
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn, TypedDict

from anabranch.text.grammar_source import make_source

NUM_STEPS = 8
"""Tokens that a trial generates: some grammars show only then how much they take."""
COMPILE_STACK = 8 << 20
STEP_STACK = 1 << 20
"""Less than the 2 MiB of the threads that compute masks in the engine."""
QUICK_SECONDS = 0.2
SLOW_PRIORITY = 5
"""Of a child that takes longer than that: it must not delay others."""
PR_SET_PDEATHSIG = 1

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
    """Bytes that the child may take beside what it was forked with."""


class Outcome(TypedDict):
    source: str
    """The grammar in llguidance's own form."""
    error: str | None
    """Why the grammar cannot be used."""
    signal: int
    """What the child died of, or 0."""
    memory: int
    """Bytes the grammar took."""


def make_matcher(tokenizer: Any, source: str) -> Any:
    """Compile a grammar and compute its first mask; llguidance's `is_error` says whether that worked."""
    import llguidance

    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    matcher.compute_bitmask()  # some grammars show only here that they are too large
    return matcher


def reason(matcher: Any) -> str:
    text: str = matcher.get_error()
    return text.replace("<non-verbose/>", "").strip()


def with_stack(stack: int, name: str, work: Any, *arguments: Any) -> Any:
    """Run a function in a thread with a stack of its own size; what it raises is raised here."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work(*arguments))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _stack_size:  # it is a setting of the whole process
        before = threading.stack_size(stack)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


_stack_size = threading.Lock()


# -- the child ---------------------------------------------------------------------------------------------------------


def try_out(tokenizer: Any, connection: socket.socket, answer: int, parent: int) -> NoReturn:
    """One grammar, within its limits; writes its source, the error and the memory it took to `answer`."""
    source, error, memory = "", None, 0
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 60)  # for a client that sends nothing
        trial: Trial = json.loads(connection.makefile("rb").readline())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # last messages of native code
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_memory(trial["memory"])
        signal.setitimer(signal.ITIMER_REAL, trial["wall_seconds"])
        signal.setitimer(signal.ITIMER_PROF, trial["seconds"])  # both end the process: it has no handlers
        before = peak_memory()
        source = make_source(trial["kind"], trial["text"], trial["open_objects"])
        matcher = with_stack(COMPILE_STACK, "compile", make_matcher, tokenizer, source)
        if matcher.is_error():
            error = f"{trial['kind']} cannot be used: {reason(matcher)}"
        else:
            with_stack(STEP_STACK, "steps", walk, matcher)
        memory = max(0, peak_memory() - before)
    except MemoryError:
        os._exit(1)
    except ValueError as failure:
        error = str(failure)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    write_all(answer, json.dumps([source, error, memory]).encode())
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


# -- the process -------------------------------------------------------------------------------------------------------


def serve(control: socket.socket, tokenizer: Any) -> None:
    running: dict[int, tuple[int, socket.socket]] = {}  # pipe → child, who is waiting for it
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
                with suppress(OSError):  # who asked has gone
                    connection.sendall(json.dumps(outcome(ready, child)).encode() + b"\n")
                connection.close()


def fork(tokenizer: Any, connection: socket.socket) -> tuple[int, int]:
    pipe, other = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if not child:
        os.close(pipe)
        try_out(tokenizer, connection, other, parent)
    os.close(other)
    return pipe, child


def outcome(pipe: int, child: int) -> Outcome:
    """Of a child that has closed its end of the pipe."""
    written = b""
    while chunk := os.read(pipe, 1 << 16):
        written += chunk
    os.close(pipe)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        source, error, memory = json.loads(written)
        return Outcome(source=source, error=error, signal=0, memory=memory)
    return Outcome(source="", error=None, signal=-code if code < 0 else signal.SIGABRT, memory=0)


def write_all(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


def read_line(source: socket.socket) -> bytes:
    """A line, and not a byte more."""
    line = bytearray()
    while not line.endswith(b"\n"):
        waiting = source.recv(1 << 16, socket.MSG_PEEK)
        if not waiting:
            raise EOFError
        end = waiting.find(b"\n")
        line += source.recv(len(waiting) if end < 0 else end + 1)
    return bytes(line)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine's parent to decide
    control = socket.socket(fileno=os.dup(0))
    try:
        setup = json.loads(read_line(control))
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
        control.sendall(json.dumps(refused).encode() + b"\n")
        if refused is None:
            gc.freeze()  # children that collect garbage would copy every page
            gc.disable()
            serve(control, tokenizer)


if __name__ == "__main__":
    main()
