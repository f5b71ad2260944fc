"""An engine without a model, for tests of what carries it: each request counts up from its first prompt token.

Its options are JSON in EngineConfig.model; some prompt tokens have a meaning of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from anabranch.config import EngineConfig
from anabranch.request import Request, TokenLogprobs, Update

REFUSE, BUG, CRASH, HANG, HANG_HARD, LOST, UNSENDABLE, DIE = range(-8, 0)
QUIET = 0.25  # seconds without a step before it may be called idle


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model=json.dumps(options))


class FakeEngine:
    def __init__(self, step_seconds: float, unsendable_stats: bool = False) -> None:
        self.step_seconds, self.unsendable_stats = step_seconds, unsendable_stats
        self.running: dict[str, tuple[Request, int]] = {}
        self.num_steps = self.num_idle = 0
        self.quiet_since = 0.0
        self.failure = ""
        self.aborts: list[tuple[str, int, int]] = []  # id, step, tokens it had

    def add(self, request: Request) -> None:
        first = request.prompt_ids[0]
        if first == REFUSE:
            raise ValueError("this prompt\nis refused")
        if first == BUG:
            raise KeyError("no such thing")
        if first == DIE:
            print("dying words", file=sys.stderr, flush=True)
            os._exit(7)
        self.running[request.id] = (request, 0)

    def abort(self, id: str) -> None:
        if id in self.running:
            self.aborts.append((id, self.num_steps, self.running.pop(id)[1]))

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Update]:
        self.num_steps += 1
        time.sleep(self.step_seconds)
        self.quiet_since = time.monotonic()
        updates = []
        for id, (request, count) in list(self.running.items()):
            first = request.prompt_ids[0]
            if first == CRASH:
                raise RuntimeError("the step\nfailed")
            if first == LOST:
                self.failure = "rank 1 of the model was ended by SIGKILL"
            if first in (HANG, LOST):
                time.sleep(600)
            if first == HANG_HARD:  # no other thread of Python runs meanwhile, and no signal handler
                ctypes.PyDLL(None).sleep(600)
            token: Any = object() if first == UNSENDABLE else first + count
            update = Update(id=id, token_ids=[token], num_cached=len(request.prompt_ids) - 1)
            if request.params.logprobs is not None:
                update.logprobs = [TokenLogprobs(token, float("-inf"), 1, ((token, float("nan")),))]
            if count + 1 == request.params.max_tokens:
                update.finish_reason = "length"
                del self.running[id]
            else:
                self.running[id] = (request, count + 1)
            updates.append(update)
        return updates

    def idle(self) -> None:
        assert not self.has_work
        assert time.monotonic() - self.quiet_since >= QUIET, "a request may be about to come"
        self.num_idle += 1
        self.quiet_since = time.monotonic()

    def stats(self) -> dict[str, Any]:
        if self.unsendable_stats and self.num_steps:
            return {"what": object()}
        counts = {"steps": self.num_steps, "idle": self.num_idle, "running": len(self.running)}
        return {"max_model_len": 99, "aborts": self.aborts, **counts}

    def close(self) -> None:
        print("closed with", len(self.running), "running", flush=True)


def make_engine(config: EngineConfig, progress: Callable[[int, int], None]) -> FakeEngine:
    options = json.loads(config.model)
    if "fail" in options:
        raise ValueError(options["fail"])
    if "die" in options:
        os._exit(options["die"])
    if options.get("no_parent_signal") and sys.platform == "linux":  # as on systems that have none
        ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
    if "child" in options:  # a grandchild, as compilers start them
        child = subprocess.Popen(["sleep", "600"])
        print("child", child.pid, flush=True)
    for done in (1, 2):
        progress(done, 2)
    end = time.monotonic() + options.get("load_seconds", 0)
    while (left := end - time.monotonic()) > 0:
        try:
            time.sleep(left)
        except SystemExit:  # as a library's callback would swallow it, once
            if not options.pop("swallows_exit", False):
                raise
    return FakeEngine(options.get("step_seconds", 0.001), options.get("unsendable_stats", False))
