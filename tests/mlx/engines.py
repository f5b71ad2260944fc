"""Engines of two platforms in one process, and requests that come and go while they run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabranch import platforms
from anabranch.config import EngineConfig
from anabranch.engine.engine import Engine, make_engine
from anabranch.request import Request, Update
from anabranch.sampling_params import SamplingParams

DEFAULTS = {"dtype": "float32", "num_pages": 256, "page_size": 4, "max_num_seqs": 16, "max_model_len": 128}


@contextmanager
def on_platform(name: str) -> Iterator[None]:
    """As if the process had been started with ANABRANCH_PLATFORM=name."""
    before = os.environ.get("ANABRANCH_PLATFORM")
    os.environ["ANABRANCH_PLATFORM"] = name
    platforms.current.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("ANABRANCH_PLATFORM")
        if before is not None:
            os.environ["ANABRANCH_PLATFORM"] = before
        platforms.current.cache_clear()


@contextmanager
def engine(folder: Path, platform: str = "mlx", **options: Any) -> Iterator[Engine]:
    with on_platform(platform):
        one = make_engine(EngineConfig(model=str(folder), **(DEFAULTS | options)))
    assert one.runner.platform.name == platform
    yield one
    one.close()
    one.scheduler.check()
    assert one.kv.usage() == 0


def greedy(max_tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams] | SamplingParams,
    joins: Mapping[int, int] | None = None,
    leaves: Mapping[int, int] | None = None,
) -> list[Update]:
    """Every request's updates in one. Request i comes before step joins[i] (default 0) and is aborted before step
    leaves[i] (default: never). Bookkeepers and caches check themselves every few steps."""
    many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    total = {str(i): Update(id=str(i)) for i in range(len(prompts))}
    joins, leaves, step = joins or {}, leaves or {}, 0
    last = max(joins.values(), default=0)
    while step <= last or engine.has_work:
        for i, (prompt, one) in enumerate(zip(prompts, many, strict=True)):
            if joins.get(i, 0) == step:
                engine.add(Request(id=str(i), prompt_ids=tuple(prompt), params=one))
            if leaves.get(i) == step:
                engine.abort(str(i))
        for update in engine.step():
            mine = total[update.id]
            mine.token_ids += update.token_ids
            mine.logprobs += update.logprobs
            mine.num_cached = update.num_cached
            mine.finish_reason = update.finish_reason
            mine.error = update.error
            mine.prompt_logprobs = update.prompt_logprobs or mine.prompt_logprobs
            mine.routed_experts = update.routed_experts or mine.routed_experts
        if step % 4 == 0:
            engine.scheduler.check()
            if engine.runner.platform.name == "mlx":
                engine.runner.check()
        step += 1
    return list(total.values())


def tokens(updates: Sequence[Update]) -> list[list[int]]:
    return [update.token_ids for update in updates]
