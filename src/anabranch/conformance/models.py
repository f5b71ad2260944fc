"""A tiny model of each family on the platform, compared with the same model computed by references on the CPU.

For a platform with a runner of its own (Platform.runner), only the engine's answers are compared.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from anabranch import ops
from anabranch.config import EngineConfig
from anabranch.conformance import Result, attempt, tiny
from anabranch.engine.engine import Engine
from anabranch.engine.runner import load_runner
from anabranch.engine.single import SingleSequence
from anabranch.loader.load import load_model
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.models.family import known
from anabranch.platforms import Platform
from anabranch.platforms.cpu import CpuPlatform
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

STEPS = (100, 41, 1, 1, 1)
"""Tokens of each step: a prefill, its next chunk, decoding."""
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Error of a row of logits, relative to its norm."""
ROWS = {"float32": 1.0, "float16": 0.9, "bfloat16": 0.9}
"""Share of rows that must be within it: in half precision a token may choose another expert, and differs more."""


def check_models(platform: Platform) -> Iterator[Result]:
    own_runner = platform.runner != Platform.runner
    with TemporaryDirectory() as scratch:
        for family in known():
            folder = Path(scratch, family)
            tiny.write(family, folder)
            if own_runner:
                check = partial(other_answers_or_refusal, folder, platform, family)
                yield attempt("models", family, "answers, float32", check)
                continue
            expected = logits(folder, CpuPlatform(), "float32", reference=True)
            for dtype in dtypes(platform):
                yield attempt("models", family, f"logits, {dtype}", partial(far, expected, folder, platform, dtype))
            if family in ("qwen2_moe", "gemma4_text", "qwen3_5_moe"):  # a shared expert; two groups of pages; states
                what = f"answers, graphs {platform.graph_mode}"
                yield attempt("models", family, what, partial(other_answers, folder, platform))


def dtypes(platform: Platform) -> list[str]:
    """The dtypes that the platform computes fp32 and bf16 models in."""
    computed = (str(platform.compute_dtype(wanted)) for wanted in (torch.float32, torch.bfloat16))
    return list(dict.fromkeys(name.removeprefix("torch.") for name in computed))


def far(expected: torch.Tensor, folder: Path, platform: Platform, dtype: str) -> list[str]:
    """The fault, if too many rows of logits differ too much from the expected ones."""
    found = logits(folder, platform, dtype)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    near = (error <= TOLERANCE[dtype]).float().mean().item()  # NaN is not near
    if near >= ROWS[dtype]:
        return []
    return [f"{1 - near:.0%} of the rows differ by more than {TOLERANCE[dtype]:g}, the worst by {error.max():.3g}"]


def logits(folder: Path, platform: Platform, dtype: str, *, reference: bool = False) -> torch.Tensor:
    """Logits of every token of a sequence that is computed in STEPS; fp32, on the CPU."""
    model = load_model(folder, platform=platform, dtype=dtype)
    if reference:
        ops.bind(platform, "reference")
    rng = random.Random(0)
    sequence = SingleSequence(model, tiny.MAX_LENGTH, page_size=platform.page_size)
    return torch.cat([sequence.forward([rng.randrange(tiny.VOCAB_SIZE) for _ in range(n)]).cpu() for n in STEPS])


def other_answers(folder: Path, platform: Platform) -> list[str]:
    """The first request whose answer differs from that of the CPU without graphs."""
    expected, found = answers(folder, CpuPlatform()), answers(folder, platform)
    return [f"request {i} got {found[i]}, not {expected[i]}" for i in expected if found[i] != expected[i]][:1]


def other_answers_or_refusal(folder: Path, platform: Platform, family: str) -> list[str]:
    """As other_answers, but a runner of a platform's own may refuse a model type by name."""
    try:
        return other_answers(folder, platform)
    except ValueError as error:
        if repr(family) not in str(error):
            raise
        return []


def answers(folder: Path, platform: Platform) -> dict[str, list[int]]:
    """Greedy answers in fp32 to requests that join and finish at different times, with the engine's defaults."""
    asked = EngineConfig(model=str(folder), dtype="float32", max_num_seqs=8, max_num_batched_tokens=128, num_pages=64)
    model = read_config(folder)
    config = resolve(replace(asked, tune="off"), model, platform)
    runner = load_runner(config, platform)
    engine = Engine(config, runner, model, None)
    runner.warm_up()
    rng = random.Random(1)
    waiting = []
    for i in range(6):
        prompt = tuple(rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(1, 160)))
        params = SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True)
        waiting.append(Request(id=str(i), prompt_ids=prompt, params=params))
    got: dict[str, list[int]] = {request.id: [] for request in waiting}
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        for update in engine.step():
            got[update.id] += update.token_ids
    engine.close()
    return got
