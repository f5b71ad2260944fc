"""Embeddings against transformers: its last hidden state, pooled and normalised; and the same vectors however the
engine schedules them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch import LLM, SamplingParams, platforms
from anabranch.embedding import PARAMS
from anabranch.platforms.fake import FakePlatform
from anabranch.request import Pooling, Request, Update
from tests.models import tiny

TOLERANCE = 1e-4
CASES = {case.name: case for case in tiny.CASES}
NAMES = ("qwen3_moe_published", "gpt_oss_published", "deepseek_v3_published", "gemma4_published", "qwen3_5_published")
"""Full attention, sinks and windows, a latent cache, a scaled embedding with two cache groups, states."""
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
LENGTHS = (1, 2, 17, 40, 33)
PROMPTS = [[3 + (7 * number + 11 * place) % 60 for place in range(length)] for number, length in enumerate(LENGTHS)]


@torch.no_grad()
def judged(judge: tiny.Judge, prompt: list[int], pooling: Pooling) -> list[float]:
    """transformers' last hidden state, which is after the last norm."""
    output = judge.model(input_ids=torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    hidden_TD = output.hidden_states[-1][0].float()
    pooled_D = hidden_TD[-1] if pooling == "last" else hidden_TD.mean(0)
    return (pooled_D / pooled_D.norm()).tolist()  # type: ignore[no-any-return]


def difference(found: Sequence[Sequence[float]], wanted: Sequence[Sequence[float]]) -> float:
    return float((torch.tensor(found) - torch.tensor(wanted)).abs().max())


def open_llm(folder: Path, **options: Any) -> LLM:
    fixed = {"dtype": "float32", "max_model_len": 64, "page_size": 4, "num_pages": 128, "max_num_seqs": 8}
    return LLM(folder, **(fixed | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(CASES["qwen3_moe_published"], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def vectors(folder: Path) -> dict[Pooling, list[list[float]]]:
    """Each prompt's, computed alone and whole."""
    with open_llm(folder, prefix_cache=False) as llm:
        return {pooling: [llm.embed(one, pooling=pooling)[0] for one in PROMPTS] for pooling in POOLINGS}


@pytest.mark.parametrize("name", NAMES)
def test_they_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    judge = tiny.Judge(tiny.save(CASES[name], tmp_path), CASES[name].model_type)
    with open_llm(tmp_path, max_num_batched_tokens=24) as llm:  # chunked and batched
        for pooling in POOLINGS:
            wanted = [judged(judge, prompt, pooling) for prompt in PROMPTS]
            assert difference(llm.embed(PROMPTS, pooling=pooling), wanted) <= TOLERANCE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"async_scheduling": False},
        {"num_pages": 12, "max_model_len": 44},
        {"speculative": "ngram"},
        {"graphs": "full"},
    ],
    ids=lambda options: ", ".join(options) or "whole",
)
def test_no_schedule_changes_them(
    folder: Path, vectors: dict[Pooling, list[list[float]]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, chunks, a prefix that is cached already, preemptions, neighbours that generate, captured steps."""
    if "graphs" in options:
        fake = FakePlatform()
        monkeypatch.setattr(platforms, "current", lambda: fake)
    with open_llm(folder, **options) as llm:
        engine = llm.engine
        for pooling in (*POOLINGS, *POOLINGS):
            for number, prompt in enumerate(PROMPTS):
                params = SamplingParams(temperature=0, max_tokens=4)
                engine.add(Request(id=f"chat {number}", prompt_ids=tuple(prompt[:20]), params=params))
                engine.add(Request(id=str(number), prompt_ids=tuple(prompt), params=PARAMS, pooling=pooling))
            found: dict[str, list[Update]] = {}
            while engine.has_work:
                for update in engine.step():
                    found.setdefault(update.id, []).append(update)
                engine.scheduler.check()
            ends = [found[str(number)] for number in range(len(PROMPTS))]
            assert all(len(updates) == 1 and not updates[0].token_ids for updates in ends)
            assert {updates[0].finish_reason for updates in ends} == {"stop"}
            embeddings = [array("f", updates[0].embedding).tolist() for updates in ends]
            assert difference(embeddings, vectors[pooling]) <= 1e-5
        assert not engine.pooled
        if "num_pages" in options:
            assert engine.scheduler.num_preemptions


def test_prompts_may_fill_the_context(folder: Path) -> None:
    """Nothing follows them."""
    prompt = [3 + place % 50 for place in range(64)]
    with open_llm(folder, num_pages=20) as llm:
        assert [len(vector) for vector in llm.embed([prompt], pooling="mean")] == [llm.engine.model.hidden_size]
        with pytest.raises(ValueError, match="64 tokens.* the prompt has 65 tokens. Shorten"):
            llm.embed([[*prompt, 3]])
        with pytest.raises(ValueError, match="64 tokens and at least one is to be generated"):
            llm.generate([prompt])


def test_they_can_be_shortened(folder: Path, vectors: dict[Pooling, list[list[float]]]) -> None:
    with open_llm(folder) as llm:
        (short,) = llm.embed(PROMPTS[3], dimensions=8)
        whole = torch.tensor(vectors["last"][3])
        assert difference([short], [(whole[:8] / whole[:8].norm()).tolist()]) <= 1e-5
        assert abs(float(whole.norm()) - 1) <= 1e-5
        for wrong in (0, llm.engine.model.hidden_size + 1, True, "8"):
            with pytest.raises(ValueError, match="dimensions must lie in"):
                llm.embed(PROMPTS[3], dimensions=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="pooling must be one of last, mean"):
            llm.embed(PROMPTS[3], pooling="max")  # type: ignore[arg-type]


def test_they_generate_nothing(folder: Path) -> None:
    with open_llm(folder) as llm:
        llm.embed(PROMPTS)
        stats = llm.stats()
        assert (stats["prompt_tokens"], stats["generation_tokens"]) == (sum(LENGTHS), 0)
        assert stats["finished"] == {"stop": len(PROMPTS)}
        assert sum(stats["time_to_first_token_seconds"]["counts"]) == 0
        assert sum(stats["e2e_request_latency_seconds"]["counts"]) == len(PROMPTS)


def test_one_can_be_aborted(folder: Path) -> None:
    with open_llm(folder, max_num_batched_tokens=8) as llm:
        llm.engine.add(Request(id="gone", prompt_ids=tuple(PROMPTS[3]), params=PARAMS, pooling="mean"))
        llm.engine.step()
        llm.engine.step()
        assert llm.engine.pooled
        llm.engine.abort("gone")
        assert not llm.engine.pooled and not [update for _ in range(3) for update in llm.engine.step()]
        llm.engine.kv.check()


def test_a_runner_without_them_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(folder) as llm:
        monkeypatch.setattr(type(llm.engine.runner), "embeds", False)
        with pytest.raises(ValueError, match="pooling: embeddings are not computed on the platform cpu"):
            llm.embed(PROMPTS[1])
        assert llm.generate(PROMPTS[1], SamplingParams(max_tokens=1))[0].token_ids
