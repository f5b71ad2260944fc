"""No kernel is compiled while requests wait: whatever a step launches was launched by the dry run before the start.

`python -m tests.engine.test_dry_run [STEPS]` lists what the dry run launches, and what is missing after so many steps.
"""

import importlib
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from anabranch import kernels
from anabranch.config import EngineConfig
from anabranch.engine.engine import make_engine
from anabranch.engine.scheduler import Sequence, Share
from anabranch.engine.torch_runner import TorchRunner
from anabranch.kernels.compiling import precompile
from anabranch.kernels.compiling.precompile import Job, recording
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams
from tests.engine.paper_h200 import all_kernels, cut_down, differences, forget, make_runner, paper_h200

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")

LONGEST = 16384
GREEDY = SamplingParams(temperature=0)
DRAWN = (SamplingParams(seed=1), SamplingParams(temperature=0.7, top_p=0.9, seed=2), SamplingParams(top_k=20, seed=3))
SPECIAL = (
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=0, logprobs=5),
    SamplingParams(seed=4, logprobs=20),
    SamplingParams(temperature=0, prompt_logprobs=2),
    SamplingParams(seed=5, repetition_penalty=1.2, presence_penalty=0.5),
    SamplingParams(temperature=0, frequency_penalty=0.3),
    SamplingParams(temperature=0, allowed_token_ids=(3, 5, 7)),
    SamplingParams(seed=6, allowed_token_ids=(1,), top_p=0.5),
    SamplingParams(temperature=0, logit_bias={4: 1.0}, min_tokens=3),
    SamplingParams(temperature=0, return_routed_experts=True),
)
TOKENS = [7] * LONGEST
ON_A_GPU = {"num_pages": 4096, "max_model_len": 8192}
CASES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {},
    "qwen1.5-moe-a2.7b": {},
    "gemma4-26b-a4b": {},
    "gemma4-26b-a4b, odd": {"max_num_batched_tokens": 333, "max_num_seqs": 17},
    "gemma4-26b-a4b, as on a GPU": ON_A_GPU,
    "qwen3.6-35b-a3b": {},
    "qwen3.6-35b-a3b, small steps": {"max_num_batched_tokens": 40},
    "qwen3.6-35b-a3b, few": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "deepseek-v2-lite": {},
    "deepseek-v2-lite, uncaptured": {"graphs": "none"},
    "gpt-oss-20b": {},
    "gpt-oss-20b, FP8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "gpt-oss-20b, uncaptured": {"graphs": "none"},
    "deepseek-v3": {},
    "ernie-4.5-21b-a3b": {},
    "glm-4.5-air": {},
    "glm-4.7-flash": {},
    "minimax-m2": {},
    "qwen3.6-35b-a3b, uncaptured": {"graphs": "none"},
    "qwen3.6-35b-a3b, prompts captured": {"graphs": "pieces"},
    "qwen3-30b-a3b, FP8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "gemma4-26b-a4b, FP8 cache": {"kv_cache_dtype": "fp8_e4m3"},
    "qwen3-30b-a3b, FP8 weights": {"quantization": "fp8"},
    "qwen3-30b-a3b, INT4 weights": {"quantization": "int4"},
    "qwen3-30b-a3b, many": {"max_num_batched_tokens": 16384, "max_num_seqs": 1500},
    "qwen1.5-moe-a2.7b, uncaptured": {"graphs": "none"},
    "qwen3-30b-a3b, prompts captured": {"graphs": "pieces"},
    "qwen3-30b-a3b, decode captured": {"graphs": "decode", "max_num_seqs": 64},
    "qwen3-30b-a3b, drafts": {"speculative": "ngram", "max_num_seqs": 60},
    "gemma4-26b-a4b, drafts": {"speculative": "ngram", "speculative_tokens": 7, "max_num_seqs": 1},
    "qwen3.6-35b-a3b, drafts": {"speculative": "ngram", "max_num_seqs": 60},
    "qwen3.6-35b-a3b, mtp": {"speculative": "mtp", "max_num_seqs": 60},
    "qwen3.6-35b-a3b, mtp uncaptured": {"speculative": "mtp", "graphs": "none"},
    "qwen3-30b-a3b, drafts uncaptured": {"speculative": "ngram", "graphs": "none"},
}


class Serving:
    """Steps as they come, of requests that exist for one step."""

    def __init__(self, runner: TorchRunner, seed: int) -> None:
        self.runner = runner
        self.rng = random.Random(seed)
        self.longest = min(LONGEST, runner.config.max_model_len)
        self.most_tokens, self.most_requests = runner.config.max_num_batched_tokens, runner.config.max_num_seqs
        self.num_groups = len(runner.model.config.cache_groups)
        self.num_pages: dict[str, int] = {}
        self.number = 0

    def about(self, most: int) -> int:
        """1 .. most, small ones as often as large ones; often a round number or one beside it."""
        found = int(most ** self.rng.random()) if self.rng.random() < 0.7 else self.rng.randint(1, most)
        if self.rng.random() < 0.3:
            found = (1 << found.bit_length() - 1) + self.rng.choice((-1, 0, 1))
        return min(max(found, 1), most)

    def step(self) -> None:
        rng, shares = self.rng, []
        slots = rng.sample(range(self.most_requests), self.most_requests)
        # What most requests want, and now and then one of them something else.
        usual = rng.choice(((GREEDY,), (GREEDY,), DRAWN, (GREEDY, *DRAWN), SPECIAL, (GREEDY, rng.choice(SPECIAL))))
        longest = self.about(self.longest)
        num_prompts = 0 if rng.random() < 0.3 else min(self.about(40), self.most_requests)
        num_single = 0
        if num_prompts < self.most_requests and (rng.random() < 0.8 or not num_prompts):
            num_single = min(self.about(self.most_requests - num_prompts), self.most_tokens)
        for place in range(num_single):
            end = longest if place == 0 else min(longest, self.about(256))
            shares.append(self.share(slots.pop(), rng.choice(usual), end - 1, end, 1))
        left, most = self.most_tokens - num_single, self.about(self.most_tokens)
        prompts = []
        if self.runner.config.speculative != "none" and rng.random() < 0.5:
            shares, drafting = self.drafted(
                shares, min(left, self.runner.config.max_samples - num_single - num_prompts)
            )
            prompts += drafting
            left -= sum(share.num_samples - 1 for share in drafting)
        for _ in range(num_prompts):
            count = min(self.about(most), left, self.longest)
            if count:
                begin = rng.choice((0, 0, rng.randint(0, max(0, longest - count))))
                end = min(begin + count, self.longest)
                prompts.append(self.share(slots.pop(), rng.choice(usual), begin, end, int(rng.random() < 0.9)))
                left -= count
        shares += sorted(prompts, key=lambda share: min(2, share.end - share.begin))
        self.launch(shares)
        if any(share.num_samples > 1 for share in shares):
            self.runner.settle(shares, [rng.randint(min(1, share.num_samples), share.num_samples) for share in shares])
        if rng.random() < 0.2:
            self.runner.idle()

    def prompts(self) -> None:
        """Forty at once, or as many as a step takes, longer than latent attention does by absorption."""
        count = min(40, self.most_requests, self.most_tokens // 200)
        self.launch([self.share(slot, GREEDY, 0, 200, 1) for slot in range(count)] if count else [])

    def drafted(self, shares: list[Share], room: int) -> tuple[list[Share], list[Share]]:
        """(shares of one token, those of them that have drafts now)"""
        single, drafting = [], []
        for share in shares:
            most = min(room, self.runner.config.max_drafts, self.longest - share.end)
            if most < 1 or self.rng.random() < 0.2:
                single.append(share)
                continue
            count = self.rng.randint(1, most)
            share.sequence.tokens, share.sequence.drafts = TOKENS[: share.end], [7] * count
            self.num_pages[share.sequence.id] = -(-(share.end + count) // self.runner.config.page_size)
            drafting.append(share._replace(end=share.end + count, num_samples=1 + count))
            room -= count
        return single, drafting

    def share(self, slot: int, params: SamplingParams, begin: int, end: int, num_samples: int) -> Share:
        self.number += 1
        request = Request(id=str(self.number), prompt_ids=(7,) * 3, params=params)
        sequence = Sequence(request, self.number)
        sequence.slot = slot
        if end - begin > 1:
            sequence.tokens = TOKENS[:end]
            sequence.num_prompt = end
        self.num_pages[request.id] = -(-end // self.runner.config.page_size)
        return Share(sequence, begin, end, num_samples)

    def launch(self, shares: list[Share]) -> None:
        self.runner.launch(shares, lambda id: [TOKENS[: self.num_pages[id]]] * self.num_groups)


def dry_run_jobs(case: str, folder: Path, num_steps: int) -> tuple[list[Job], list[Job], list[str]]:
    """(what the dry run launches, what steps launch besides, where)"""
    with paper_h200(), recording() as jobs, torch.inference_mode():
        runner = make_runner(case.partition(",")[0], folder, **CASES[case])
        num_dry = 0

        def compile_ahead(platform: object, work: Callable[[], object]) -> None:
            nonlocal num_dry
            work()
            num_dry = len(jobs)

        with mock.patch.object(kernels, "compile_ahead", compile_ahead):
            runner.warm_up()
        where = ["captured"] * (len(jobs) - num_dry)
        serving = Serving(runner, 0)
        for number in range(num_steps):
            before = len(jobs)
            serving.step()
            where += [f"step {number}"] * (len(jobs) - before)
        before = len(jobs)
        serving.prompts()
        where += ["prompts"] * (len(jobs) - before)
    forget(job.kernel for job in jobs)
    return jobs[:num_dry], jobs[num_dry:], where


SLOW = {
    "deepseek-v2-lite, uncaptured",
    "deepseek-v3",
    "ernie-4.5-21b-a3b",
    "gemma4-26b-a4b, FP8 cache",
    "glm-4.5-air",
    "glm-4.7-flash",
    "gpt-oss-20b, FP8 cache",
    "gpt-oss-20b, uncaptured",
    "minimax-m2",
    "qwen1.5-moe-a2.7b, uncaptured",
    "qwen3-30b-a3b, FP8 weights",
    "qwen3-30b-a3b, INT4 weights",
    "qwen3.6-35b-a3b, mtp uncaptured",
    "qwen3.6-35b-a3b, prompts captured",
}
"""What these have, others have one by one."""


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_steps_launch_only_what_the_dry_run_did(case: str, tmp_path: Path, thorough: bool) -> None:
    # Where steps are captured, few of these see every kernel that many do.
    num_steps = 60 if thorough or "graphs" in CASES[case] else 25
    known, missing, where = dry_run_jobs(case, tmp_path, num_steps)
    assert len(known) > 20
    assert not missing, "\n".join(f"{at}: {differences(job, known)}" for job, at in zip(missing, where, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        "qwen3-30b-a3b",
        "qwen1.5-moe-a2.7b",
        "gemma4-26b-a4b",
        "qwen3-30b-a3b, FP8 cache",
        "deepseek-v2-lite",
        "gpt-oss-20b",
    ],
)
def test_nothing_is_compiled_on_a_gpu(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    forget(all_kernels())  # what other tests have left in memory would not be missed
    cut_down(case.partition(",")[0], tmp_path)
    known: list[Job] = []
    failed: list[str] = []
    compile_jobs = precompile.precompile

    def kept(jobs: list[Job]) -> None:
        known.extend(jobs)
        failed.extend(compile_jobs(jobs))

    monkeypatch.setattr(precompile, "precompile", kept)
    options = ON_A_GPU | CASES[case]
    engine = make_engine(EngineConfig(model=str(tmp_path), load_format="dummy", tune="off", **options))
    assert known and not failed, failed
    missing: list[str] = []
    step = "captured"

    def note(src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            options = {name: metadata[name] for name in known[0].options if name in metadata}
            job = Job(src.fn, src.signature, src.constants, src.attrs, options, metadata["target"])
            missing.append(f"{step}: {differences(job, known)}")

    monkeypatch.setattr(importlib.import_module("triton.knobs").compilation, "listener", note)
    serving = Serving(engine.runner, 0)
    for number in range(60):
        step = f"step {number}"
        serving.step()
    engine.runner.platform.synchronize()
    engine.close()
    assert not missing, "\n".join(missing)


if __name__ == "__main__":
    for case in CASES:
        with tempfile.TemporaryDirectory() as made:
            known, missing, where = dry_run_jobs(case, Path(made), int(sys.argv[1]) if sys.argv[1:] else 300)
        print(f"== {case}: {len(known)} in the dry run, {len(missing)} missing")
        print(
            "   "
            + ", ".join(f"{kernel} {n}" for kernel, n in sorted(Counter(j.kernel.__name__ for j in known).items()))
        )
        for job, at in zip(missing, where, strict=True):
            print(f"   {at}: {differences(job, known)}")
