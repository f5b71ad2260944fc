"""What a step costs in Python alone: scheduler, pages, batch tensors, updates; the model is left out.

Prints µs per step with so many requests decoding at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from anabranch import kernels, platforms
from anabranch.bench.offline import commit
from anabranch.config import EngineConfig
from anabranch.engine.batch import StepMaker
from anabranch.engine.engine import Engine
from anabranch.engine.scheduler import Sequence, Share
from anabranch.models.config import AttentionConfig, LayerConfig, ModelConfig, RopeConfig
from anabranch.request import Request, TokenLogprobs
from anabranch.sampling_params import SamplingParams

SIZES = (1, 64, 256, 1024)
CONTEXT = 512


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps to time at each size (default 200)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")


@dataclass(slots=True)
class Made:
    """A step that took no time."""

    shares: list[Share]
    sampling: list[Share]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    sampled: Any = None
    routed: Any = None

    def wait(self) -> list[int]:
        return [7] * len(self.sampling)


class NoModel:
    """A runner that makes the batch's tensors and nothing else."""

    def __init__(self, config: EngineConfig, num_pages: int) -> None:
        self.config = config
        self.pages = num_pages
        self.extras: dict[str, Any] = {}

    def num_pages(self) -> list[int]:
        return [self.pages]

    def allocate(self, num_pages: list[int]) -> None:
        config = self.config
        self.steps = StepMaker(1, config.max_num_seqs, config.max_model_len, config.page_size, torch.device("cpu"))

    def launch(self, shares: list[Share], pages: Any) -> Made:
        for share in shares:
            if not share.sequence.placed:
                self.steps.join(share.sequence.slot)
                share.sequence.placed = True
        self.steps.make(shares, pages)
        return Made(shares, [share for share in shares if share.samples], {})

    def accept(self, sequence: Sequence, slot: int, token: int) -> None:
        return None

    def expert_load(self) -> list[list[int]]:
        return []

    def close(self) -> None:
        return None


def model_config() -> ModelConfig:
    rope = RopeConfig(head_dim=8, rotary_dim=8)
    attention = AttentionConfig(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, rope=rope)
    return ModelConfig(
        model_type="llama",
        vocab_size=1000,
        hidden_size=8,
        layers=(LayerConfig(attention=attention, mlp_width=8),),
        activation="silu",
        norm_eps=1e-6,
        tie_embeddings=True,
        max_position=4096,
    )


def measure(num_requests: int, num_steps: int) -> float:
    """Median µs of a step with so many requests decoding at contexts around CONTEXT."""
    config = EngineConfig(
        model="none", max_num_seqs=num_requests, page_size=16, max_model_len=2048, max_num_batched_tokens=8192
    )
    engine = Engine(config, NoModel(config, num_requests * 64 + 256), model_config())  # type: ignore[arg-type]
    rng = random.Random(0)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 400, ignore_eos=True, detokenize=False)
    for i in range(num_requests):
        prompt = tuple(rng.randrange(1000) for _ in range(CONTEXT + rng.randrange(16)))
        engine.add(Request(id=str(i), prompt_ids=prompt, params=params))
    while any(sequence.num_computed < sequence.num_prompt for sequence in engine.sequences.values()):
        engine.step()
    times = []
    for _ in range(num_steps):
        started = time.perf_counter()
        updates = engine.step()
        times.append(time.perf_counter() - started)
        assert len(updates) == num_requests
    engine.close()
    return 1e6 * statistics.median(times)


def run(options: argparse.Namespace) -> int:
    kernels.bind(platforms.make("cpu"))
    torch.set_num_threads(1)  # a second one would only wait: what is measured is Python
    found = {}
    print(f"{'running':>8}{'µs a step':>12}{'µs a request':>14}")
    for size in SIZES:
        found[size] = measure(size, options.steps)
        print(f"{size:>8}{found[size]:>12.0f}{found[size] / size:>14.2f}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            machine = f"{platform.machine()}, {os.cpu_count()} cores"
            about = {"commit": commit(), "command": "anabranch bench host", "machine": machine}
            json.dump({**about, "host_us_per_step": found}, file, indent=1)
    return 0
