"""The experts' histogram counts every token that the model computes, captured or not: held against the ids that
requests ask for, added up one by one. On the fake platform and the GPU."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch import platforms
from anabranch.config import EngineConfig
from anabranch.engine.engine import Engine, make_engine
from anabranch.platforms.fake import FakePlatform
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams
from tests.models import tiny

FAMILIES = {case.model_type: case for case in reversed(tiny.CASES)}
OPTIONS: dict[str, Any] = {
    "num_pages": 512, "page_size": 16, "max_num_seqs": 12, "max_model_len": 128, "tune": "off", "dtype": "float32"
}  # fmt: skip
MODES: list[dict[str, Any]] = [
    {"graphs": "none"},
    {"graphs": "pieces"},
    {"graphs": "traced"},
    {"graphs": "decode"},
    {"graphs": "full", "max_num_batched_tokens": 40},
    {"graphs": "full", "async_scheduling": False},
]


@pytest.fixture(params=["fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    made = FakePlatform() if request.param == "fake" else platforms.make(request.param)
    monkeypatch.setattr(platforms, "current", lambda: made)
    yield request.param


def serve(engine: Engine, seed: int) -> list[list[int]]:
    """Counts by layer and expert, added up from what each request is told."""
    rng = random.Random(seed)
    for i in range(10):
        prompt = tuple(rng.randrange(tiny.VOCAB_SIZE) for _ in range(rng.randrange(1, 60)))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.9)),
            seed=i,
            max_tokens=rng.randrange(1, 24),
            ignore_eos=True,
            return_routed_experts=True,
            logprobs=rng.choice((None, None, 1)),
        )
        engine.add(Request(id=f"{seed} {i}", prompt_ids=prompt, params=params))
    layers = [layer.moe for layer in engine.model.layers if layer.moe is not None]
    counts = [[0] * moe.num_experts for moe in layers]
    while engine.has_work:
        for update in engine.step():
            for token in update.routed_experts or []:
                for row, experts in zip(counts, token, strict=True):
                    for expert in experts:
                        row[expert] += 1
    return counts


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", pytest.param("gemma4_text", marks=pytest.mark.slow)])
def test_every_token_is_counted(family: str, platform: str, tmp_path: Path) -> None:
    folder = tiny.save(FAMILIES[family], tmp_path)
    for mode in MODES if family == "mixtral" else MODES[::4]:
        engine = make_engine(EngineConfig(model=str(folder), **(OPTIONS | mode)))
        assert engine.config.expert_load_interval == 16
        expected = serve(engine, 1)
        assert engine.stats()["expert_load"] == expected, mode
        more = serve(engine, 2)
        assert sum(map(sum, more)) > 0
        total = [[a + b for a, b in zip(*rows)] for rows in zip(expected, more, strict=True)]
        assert engine.stats()["expert_load"] == total, mode
        engine.close()


def test_copies_are_rare_and_nothing_is_counted_without_them(
    platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(FAMILIES["mixtral"], tmp_path)
    made = platforms.current()
    fetched: list[tuple[int, ...]] = []
    fetch = type(made).fetch

    def noted(self: Any, tensor: Any) -> Any:
        fetched.append(tuple(tensor.shape))
        return fetch(self, tensor)

    monkeypatch.setattr(type(made), "fetch", noted)
    for interval in (8, 0):
        engine = make_engine(EngineConfig(model=str(folder), **OPTIONS, expert_load_interval=interval))
        fetched.clear()
        serve(engine, 3)
        num_steps = engine.stats()["steps"]
        shape = tuple(engine.runner.experts.count_LE.shape)
        assert (fetched.count(shape) > 0) == bool(interval) and fetched.count(shape) <= num_steps / 8 + 1
        assert bool(engine.stats()["expert_load"]) == bool(interval)
        engine.close()
