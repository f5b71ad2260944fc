"""The model that comes with the package: found when none is named, small, quick, and the same tokens everywhere."""

import json
import time
from pathlib import Path

import pytest
import torch

from anabranch import bundled
from anabranch.cli.main import main
from anabranch.llm import LLM, SamplingParams
from tools import tiny_model

PINNED = Path(__file__).with_name("pinned.json")
"""Greedy continuations: `python -m tools.train_demo.card FOLDER --pin tests/bundled/pinned.json` writes them."""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny_model.write(tmp_path / "tiny")
    monkeypatch.setattr(bundled, "PLACE", tmp_path / "tiny")
    return tmp_path / "tiny"


def test_without_it_commands_name_cause_and_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundled, "PLACE", tmp_path / "nothing")
    for command in (["generate", "Once"], ["chat"], ["serve"]):
        assert main(command) == 1
        said = capsys.readouterr().err
        assert said.startswith(f"anabranch {command[0]}: no model is named") and "name a folder or a hub id" in said


def test_a_prompt_alone_goes_to_it(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "Once upon", "--max-tokens", "6", "--quiet"]) == 0
    alone = capsys.readouterr().out
    assert alone.startswith("Once upon") and len(alone) > len("Once upon\n")
    assert main(["generate", "--max-tokens", "6", str(tiny), "--quiet", "Once upon"]) == 0
    assert capsys.readouterr().out == alone, "options may stand anywhere"


def test_a_model_alone_is_no_prompt(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny)]) == 1
    assert "is a model; give the text to continue after it" in capsys.readouterr().err


def test_it_is_small_and_whole() -> None:
    sizes = {path.name: path.stat().st_size for path in bundled.PLACE.iterdir()}
    assert sum(sizes.values()) < 15e6
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= set(sizes)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(sizes)
    assert "?" not in (bundled.PLACE / "README.md").read_text().partition("## How good")[0], "a figure is missing"


def test_it_loads_quickly() -> None:
    def load() -> float:
        started = time.perf_counter()
        LLM(bundled.folder(), max_num_seqs=1, max_num_batched_tokens=1024).close()
        return time.perf_counter() - started

    load()  # imports
    assert min(load() for _ in range(3)) < 1.0  # about 0.1 s on a quiet machine


def test_greedy_tokens_are_pinned_and_transformers_agrees() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pinned = json.loads(PINNED.read_text())
    assert len(pinned) >= 3 and all(row["lead"] > 1e-3 for row in pinned), "a pin must not hang on rounding"
    assert continuations() == [(row["text"], row["token_ids"]) for row in pinned]
    tokenizer, model = AutoTokenizer.from_pretrained(bundled.PLACE), AutoModelForCausalLM.from_pretrained(bundled.PLACE)
    for row in pinned:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        length = len(row["token_ids"])
        with torch.inference_mode():
            found = model.generate(ids, max_new_tokens=length, min_new_tokens=length, do_sample=False)
        assert found[0, ids.shape[1] :].tolist() == row["token_ids"]


@pytest.mark.gpu
def test_greedy_tokens_are_the_same_on_the_gpu() -> None:
    assert continuations() == [(row["text"], row["token_ids"]) for row in json.loads(PINNED.read_text())]


def test_it_tells_a_story_in_whole_words_and_uses_its_experts() -> None:
    with LLM(bundled.folder(), max_num_seqs=4, max_num_batched_tokens=1024) as llm:
        question = [{"role": "user", "content": "Tell me a story about a dog who finds a ball."}]
        params = SamplingParams(temperature=0.7, top_p=0.95, seed=0, max_tokens=300, return_routed_experts=True)
        answer = llm.chat(question, params)[0].completions[0]
    assert answer.finish_reason == "stop" and len(answer.text.split()) > 20 and answer.text.rstrip()[-1] in '.!?"'
    assert answer.routed_experts is not None
    used = [{expert for token in answer.routed_experts for expert in token[layer]} for layer in range(6)]
    assert all(len(experts) >= 8 for experts in used), "half of a layer's experts see a story"


def continuations() -> list[tuple[str, list[int]]]:
    rows = json.loads(PINNED.read_text())
    with LLM(bundled.folder(), max_num_seqs=4, max_num_batched_tokens=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(rows[0]["token_ids"]), ignore_eos=True)
        answers = [output.completions[0] for output in llm.generate([row["prompt"] for row in rows], params)]
    return [(answer.text, answer.token_ids) for answer in answers]
