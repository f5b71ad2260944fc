"""Measure the host's time in a step: scheduler, pages, batch tensors, sampler and updates, without a model.

Prints µs per step for several numbers of running requests: first while all of them decode, then while some finish and
others join with a prompt in every step.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from anabranch import kernels, platforms
from anabranch.bench.op_cases import tiny
from anabranch.bench.records import commit, host_machine
from anabranch.bench.step import decode, decode_step
from anabranch.config import EngineConfig
from anabranch.engine.batch import StepMaker
from anabranch.engine.engine import Engine
from anabranch.engine.runner import Launched, Pages
from anabranch.engine.sampler import Sampler
from anabranch.engine.scheduler import Share
from anabranch.engine.slots import Slots
from anabranch.options import at_least
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

SIZES = (1, 64, 256, 1024)
CONTEXT = 512
VOCABULARY = 2
"""Of the logits: so small that sampling costs no more than its calls."""
PROMPT, SHARED, OUTPUT = 96, 64, (10, 60)
"""Of requests that join and finish: tokens of a prompt, those that all prompts begin with, tokens of an answer."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--steps", type=at_least(1), default=200, metavar="N", help="steps to time at each size (default 200)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file too")


class InstantStep(Launched):
    """A launched step whose tokens are there at once."""

    def wait(self) -> list[int]:
        return [7] * len(self.sampling)


class NoModel:
    """A runner that makes a step's tensors and samples from two logits a request, and nothing else."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        self.config = config
        self.pages = num_pages

    def num_pages(self) -> list[int]:
        return [self.pages]

    def allocate(self, num_pages: list[int], max_model_len: int) -> None:
        config, cpu = self.config, torch.device("cpu")
        self.steps = StepMaker(1, config.max_num_seqs, max_model_len, config.page_size, cpu)
        self.sampler = Sampler(config.max_num_seqs, VOCABULARY, cpu)
        self.sampler.by_slot = True  # as where there are kernels
        self.slots = Slots(self.sampler, ())

    def launch(self, shares: list[Share], pages: Pages) -> InstantStep:
        for share in shares:
            if not share.sequence.placed:
                self.slots.place(share.sequence)
                self.steps.join(share.sequence.slot)
        self.steps.make(shares, pages)
        sampling = [share for share in shares if share.num_samples]
        if sampling:
            slots = [share.sequence.slot for share in sampling]
            self.sampler.sample(torch.zeros(len(slots), VOCABULARY), slots)
        return InstantStep(shares, sampling)

    def _nothing(self, *_: Any) -> None:
        return None

    accept = idle = close = _nothing

    def expert_load(self, settled: bool = False) -> list[list[int]]:
        return []


def make_engine(num_requests: int) -> Engine:
    config = EngineConfig(
        model="none", max_num_seqs=num_requests, page_size=16, max_model_len=2048, max_num_batched_tokens=8192
    )
    return Engine(config, NoModel(config, num_requests * 64 + 256), tiny())  # type: ignore[arg-type]


def measure(num_requests: int, num_steps: int) -> float:
    """Median µs of a step in which `num_requests` decode at contexts around CONTEXT."""
    engine, rng = make_engine(num_requests), random.Random(0)
    decode(engine, [CONTEXT + rng.randrange(16) for _ in range(num_requests)], num_steps + 400)
    times = [decode_step(engine) for _ in range(num_steps)]
    engine.close()
    return 1e6 * statistics.median(times)


def measure_churn(num_requests: int, num_steps: int) -> tuple[float, float]:
    """(median µs of a step with `num_requests` running, requests that join in one)"""
    engine, rng = make_engine(num_requests), random.Random(0)
    shared = tuple(rng.randrange(1000) for _ in range(SHARED))
    times, joined = [], 0
    for number in range(OUTPUT[1] + num_steps):
        arriving = []
        for i in range(num_requests - len(engine.sequences)):
            most = rng.randint(1, OUTPUT[1]) if number == 0 else rng.randint(*OUTPUT)  # not all finish at once
            params = SamplingParams(temperature=0.8, top_p=0.95, seed=i, max_tokens=most, ignore_eos=True)
            prompt = shared + tuple(rng.randrange(1000) for _ in range(PROMPT - SHARED))
            arriving.append(Request(id=f"{number} {i}", prompt_ids=prompt, params=params))
        started = time.perf_counter()
        for request in arriving:
            engine.add(request)
        engine.step()
        if number >= OUTPUT[1]:
            times.append(time.perf_counter() - started)
            joined += len(arriving)
    engine.close()
    return 1e6 * statistics.median(times), joined / num_steps


def run(options: argparse.Namespace) -> int:
    kernels.bind(platforms.make("cpu"))
    torch.set_num_threads(1)  # Python is measured: a second thread would only wait
    plain, churned = {}, {}
    print(f"{'running':>8}{'joining':>9}{'µs a step':>12}{'µs a request':>14}")
    for size in SIZES:
        plain[size] = measure(size, options.steps)
        print(f"{size:>8}{0:>9}{plain[size]:>12.0f}{plain[size] / size:>14.2f}", flush=True)
    for size in SIZES[1:]:
        churned[size], joining = measure_churn(size, options.steps)
        print(f"{size:>8}{joining:>9.1f}{churned[size]:>12.0f}{churned[size] / size:>14.2f}", flush=True)
    if options.json:
        about = {"commit": commit(), "command": "anabranch bench host", "machine": host_machine()}
        figures = {"host_us_per_step": plain, "host_us_per_mixed_step": churned}
        Path(options.json).write_text(json.dumps(about | figures, indent=1))
    return 0
