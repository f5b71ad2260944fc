"""A rank that ends or hangs, in tests with and without the server's packages."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from anabranch.config import EngineConfig
from anabranch.engine.engine import Engine, make_engine
from anabranch.engine.runner import Progress
from anabranch.llm import LLM, SamplingParams
from anabranch.parallel.group import TorchGroup
from anabranch.ranks.runner import RanksRunner
from anabranch.ranks.watch import HANG_SECONDS
from tests.models import tiny

PROMPTS = [[(7 * i + j * j) % tiny.VOCAB_SIZE for j in range(length)] for i, length in enumerate((5, 33, 1, 18))]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SECONDS = 10.0
SAID = {
    signal.SIGKILL: "rank {} of the model was ended by SIGKILL",
    signal.SIGSTOP: "rank {} of the model hangs: no heartbeat for 7 s",
}


def fails_soon(llm: LLM, sent: signal.Signals, rank: int, generating: bool) -> None:
    runner = llm.engine.runner
    assert isinstance(runner, RanksRunner)
    processes = [follower.process for follower in runner.followers]
    pid = processes[rank - 1].pid
    assert pid is not None
    llm.generate(PROMPTS, GREEDY)
    began = time.monotonic()
    if generating:
        threading.Timer(0.3, os.kill, (pid, sent)).start()
        with pytest.raises(RuntimeError, match=SAID[sent].format(rank)):
            while True:
                llm.generate(PROMPTS, GREEDY)
    else:
        os.kill(pid, sent)
        while not runner.failure:
            assert time.monotonic() - began < SECONDS
            time.sleep(0.05)
        assert runner.failure == SAID[sent].format(rank)
        with pytest.raises(RuntimeError, match=SAID[sent].format(rank)):
            llm.generate(PROMPTS, GREEDY)
    for process in processes:
        process.join(1)
        assert process.exitcode is not None
    assert time.monotonic() - began < SECONDS


def make_busy_engine(config: EngineConfig, progress: Progress | None) -> Engine:
    """The real one, but its process computes in a step, before a collective in which others wait, for longer than it
    may be silent."""
    engine = make_engine(config, progress)
    all_reduce, num_calls = TorchGroup.all_reduce, 0

    def compute(self: TorchGroup, x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        end = time.monotonic() + (HANG_SECONDS + 2 if num_calls == 4 else 0)
        while time.monotonic() < end:
            pass
        return all_reduce(self, x)

    TorchGroup.all_reduce = compute  # type: ignore[method-assign]
    return engine
