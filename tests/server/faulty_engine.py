"""The real engine, but some prompts make a step fail, hang, end the process or leak a descriptor; steps can be slow."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from anabranch.config import EngineConfig
from anabranch.engine import engine
from anabranch.request import Request, Update

CRASH, HANG, EXIT, BUG, LEAK = "!crash", "!hang", "!exit", "!bug", "!leak"


class Faulty:
    def __init__(self, real: engine.Engine, step_seconds: float) -> None:
        self.real, self.step_seconds = real, step_seconds
        self.faults: list[str] = []

    def add(self, request: Request) -> None:
        assert self.real.tokenizer is not None
        text = self.real.tokenizer.decode(request.prompt_ids)
        if text.startswith(BUG):
            raise KeyError("a bug in add")
        if text.startswith(LEAK):
            os.open(os.devnull, os.O_RDONLY)
        self.real.add(request)
        self.faults += [fault for fault in (CRASH, HANG, EXIT) if text.startswith(fault)]

    def step(self) -> list[Update]:
        time.sleep(self.step_seconds)
        updates = self.real.step()
        if updates and self.faults:
            if self.faults[0] == CRASH:
                raise RuntimeError("the step failed")
            if self.faults[0] == HANG:
                time.sleep(3600)
            os._exit(7)
        return updates

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def make_engine(config: EngineConfig, progress: Callable[[int, int], None]) -> Faulty:
    return Faulty(engine.make_engine(config, progress), float(os.environ.get("STEP_SECONDS", "0")))


def make_slowly(config: EngineConfig, progress: Callable[[int, int], None]) -> Faulty:
    time.sleep(float(os.environ["LOAD_SECONDS"]))
    return make_engine(config, progress)
