"""Every family on the GPU: the judge's logits and, through the whole engine, its greedy tokens."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models import tiny

pytestmark = pytest.mark.gpu

CASES = {case.model_type: case for case in reversed(tiny.CASES)}


@pytest.mark.parametrize("model_type", CASES)
def test_logits_and_greedy_tokens(model_type: str, tmp_path: Path) -> None:
    from anabranch.engine.single import SingleSequence
    from anabranch.llm import LLM, SamplingParams
    from anabranch.loader.load import load_model

    case = CASES[model_type]
    folder = tiny.save(case, tmp_path / "model")
    judge, prompt = tiny.Judge(folder, model_type), tiny.prompt(case)
    model = load_model(folder, dtype="float32")
    assert model.embed_tokens.weight.device.type == "cuda"
    found = SingleSequence(model, 256).forward(prompt).cpu()
    assert (found - judge.logits(prompt)).abs().max() < 1e-4

    expected, options = judge.greedy(prompt), {"num_pages": 256, "max_num_batched_tokens": 32, "tune": "off"}
    if case.settings.get("linear_key_head_dim") == 12:  # no kernel has such heads, and a graph not their reference
        # A capture that fails leaves the device's random numbers and memory pool of its process unusable.
        start = f"from anabranch.llm import LLM; LLM({str(folder)!r}, dtype='float32', **{options!r})"
        done = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=False)
        assert done.returncode != 0 and "graphs none" in done.stderr, done.stderr
        options["graphs"] = "none"
    with LLM(str(folder), dtype="float32", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(expected), ignore_eos=True)
        outputs = llm.generate([prompt, prompt[:9], prompt], params)
    assert outputs[0].token_ids == outputs[2].token_ids == expected


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma4_text"])
def test_an_fp8_cache(model_type: str, tmp_path: Path) -> None:
    """The CPU's logits, and answers that do not depend on the batch. A key between two numbers of FP8 may go to either,
    which moves an element of it by a sixteenth."""
    from anabranch import platforms
    from anabranch.engine.single import SingleSequence
    from anabranch.llm import LLM, SamplingParams
    from anabranch.loader.load import load_model

    case = CASES[model_type]
    folder = tiny.save(case, tmp_path / "model")
    prompt = tiny.prompt(case)
    expected, found = (
        SingleSequence(load_model(folder, dtype="float32", kv_cache_dtype="fp8_e4m3", platform=platform), 256).forward(
            prompt
        )
        for platform in (platforms.make("cpu"), platforms.current())
    )
    assert found.device.type == "cuda"
    assert (found.cpu() - expected).norm() < 2e-2 * expected.norm()

    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    options = {"num_pages": 256, "max_num_batched_tokens": 32, "tune": "off", "kv_cache_dtype": "fp8_e4m3"}
    with LLM(str(folder), dtype="float32", **options) as llm:
        outputs = llm.generate([prompt, prompt[:9], prompt], params)
        again = llm.generate([prompt], params)
    assert outputs[0].token_ids == outputs[2].token_ids == again[0].token_ids
    assert outputs[0].token_ids[0] == int(expected[-1].argmax())


@pytest.mark.parametrize("graphs", ["full", "pieces", "none"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gemma4_text", "qwen3_5_moe", "qwen3_next"])
def test_drafts_change_no_answer(model_type: str, graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy, drawn, and with what is not sampled in the graph; captured as decode steps where graphs are full."""
    from anabranch.engine import engine as engine_module
    from anabranch.llm import LLM, SamplingParams
    from tests.engine.test_speculation import Guesses

    case = CASES[model_type]
    folder = tiny.save(case, tmp_path / "model")
    prompts = [tiny.prompt(case)[:length] for length in (9, 30, 53, 12, 41)]
    usual = {"max_tokens": 40, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **usual),
        SamplingParams(temperature=1, seed=1, **usual),
        SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, **usual),
        SamplingParams(temperature=0, logprobs=2, **usual),
        SamplingParams(temperature=0.9, seed=3, logit_bias={3: 2.0}, **usual),
    ]
    guesses = Guesses([])
    monkeypatch.setattr(engine_module, "NgramDrafter", guesses)
    options = {"num_pages": 256, "tune": "off", "graphs": graphs, "max_num_seqs": 8, "speculative": "ngram"}
    with LLM(str(folder), dtype="float32", **options) as llm:
        for chosen in ([0], [1, 2], [0, 1, 2, 3, 4]):  # as one graph: greedy, drawn, logits alone
            llm.engine.set_drafting(False)
            some = [prompts[i] for i in chosen], [params[i] for i in chosen]
            plain = llm.generate(*some)
            guesses.known = [[*prompt, *output.token_ids] for prompt, output in zip(some[0], plain, strict=True)]
            llm.engine.set_drafting(True)
            accepted = llm.engine.metrics.accepted_tokens
            drafted = llm.generate(*some)
            assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]
            assert llm.engine.metrics.accepted_tokens - accepted > 15 * len(chosen)


@pytest.mark.parametrize("graphs", ["full", "pieces", "none"])
@pytest.mark.parametrize("knows", [False, True], ids=["random", "knows the model"])
def test_drafts_of_a_draft_layer_change_no_answer(knows: bool, graphs: str, tmp_path: Path) -> None:
    from anabranch.llm import LLM, SamplingParams
    from tests.engine.test_mtp import Reference

    folder = Reference("qwen3_5_moe", tmp_path / "model", mapping=knows).folder
    prompts = [tiny.prompt(CASES["qwen3_5_moe"])[:length] for length in (9, 30, 53, 12, 41)]
    usual = {"max_tokens": 40, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **usual),
        SamplingParams(temperature=1, seed=1, **usual),
        SamplingParams(temperature=0.8, seed=2, top_k=20, top_p=0.9, **usual),
        SamplingParams(temperature=0, logprobs=2, **usual),
        SamplingParams(temperature=0, logit_bias={3: 2.0}, **usual),
    ]
    found = {}
    options = {"num_pages": 256, "tune": "off", "graphs": graphs, "max_num_seqs": 8, "dtype": "float32"}
    for speculative in ("none", "mtp"):
        with LLM(str(folder), speculative=speculative, **options) as llm:
            outputs = [llm.generate(prompts[:1], params[0]), llm.generate(prompts, params)]
            found[speculative] = [one.token_ids for some in outputs for one in some]
            metrics = llm.engine.metrics
    assert found["mtp"] == found["none"]
    assert metrics.draft_tokens > 100
    assert (metrics.accepted_tokens > 0.3 * metrics.draft_tokens) == knows


DENSE, ROUTED = ("llama", "qwen3", "qwen3_5"), ("qwen3_moe", "qwen3_5_moe", "qwen3_next", "deepseek_v2", "gpt_oss")


@pytest.mark.parametrize("model_type", [*DENSE, *ROUTED])
def test_bf16_stays_near_the_judge(model_type: str, tmp_path: Path) -> None:
    """Of models with experts, half of the rows: where rounding makes a router choose others, the rest are far away."""
    from anabranch.engine.single import SingleSequence
    from anabranch.loader.load import load_model

    case = CASES[model_type]
    folder = tiny.save(case, tmp_path / "model")
    prompt = tiny.prompt(case)
    exact = tiny.Judge(folder, model_type).logits(prompt)
    sequence = SingleSequence(load_model(folder, dtype="bfloat16"), 256)
    found = torch.cat([sequence.forward(prompt[:-20]), *(sequence.forward([token]) for token in prompt[-20:])])
    error = (found.float().cpu() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.median() < 4e-2
    if model_type in DENSE:
        assert error.max() < 1e-1
