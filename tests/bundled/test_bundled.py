"""The model that comes with the package: found when none is named, small, quick, and the same tokens everywhere."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from anabranch import bundled
from anabranch.cli.main import main
from anabranch.llm import LLM, SamplingParams
from tools import tiny_model
from tools.train_demo import behave

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
    assert sum(sizes.values()) < 24e6
    assert {"config.json", "generation_config.json", "model.safetensors", "README.md"} <= set(sizes)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= set(sizes)
    assert "?" not in (bundled.PLACE / "README.md").read_text().partition("## How good")[0], "a figure is missing"


def test_a_first_answer_imports_no_compiler() -> None:
    """That takes longer than the answer."""
    code = "from anabranch.llm import LLM; import sys; LLM(show_progress=False).generate(['One day'])"
    code += "; assert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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


def talk(llm: LLM, *turns: str, before: list[dict[str, str]] | None = None) -> list[str]:
    """Greedy answers to what a user says, turn by turn; the model reads its own answers."""
    messages = list(before or [])
    answers = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        answer = llm.chat(messages, SamplingParams(temperature=0, max_tokens=300))[0].completions[0]
        assert answer.finish_reason == "stop", answer.text
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer.text)
    return answers


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(bundled.folder(), max_num_seqs=4, max_num_batched_tokens=1024) as one:
        yield one


@pytest.mark.parametrize("name", ["Anna", "Zoltan"])
def test_it_knows_a_name_that_it_was_told(llm: LLM, name: str) -> None:
    assert name in talk(llm, f"My name is {name}.", "What is my name?")[1]
    assert name in talk(llm, f"Hi, I am {name}.", "Why do we sleep?", "What is my name?")[2]
    assert "not" in talk(llm, "What is my name?")[0], "it must not make one up"


def test_yes_or_no_is_answered_with_yes_or_no(llm: LLM) -> None:
    assert talk(llm, "Is the sun hot? Yes or no.", "Is ice hot? Yes or no.")[0].startswith("Yes")
    assert talk(llm, "Can a fish walk? Yes or no.")[0].startswith("No")
    assert talk(llm, "Is ice cold? Yes or no.", "Is a mouse bigger than an elephant?")[1].startswith("No")


def test_a_story_goes_on_with_its_hero_and_takes_another_name(llm: LLM) -> None:
    _, more = talk(llm, "Tell me a story about a fox named Bruno.", "And then?")
    assert "Bruno" in more and len(more.split()) > 10
    asked = "Write a short story about a girl who is afraid of the dark."
    told, renamed, who = talk(llm, asked, "Call the girl Rosa.", "What is the girl's name?")
    assert "Rosa" not in told and renamed.count("Rosa") >= 3 and "dark" in renamed and "Rosa" in who


def test_a_long_conversation_is_answered(llm: LLM) -> None:
    kinds = ["fox", "bear", "cat", "duck", "rabbit", "mouse", "owl"]
    kinds += ["frog", "goat", "pony", "turtle", "bird", "dog", "tiger"]
    turns = [f"Tell me a story about a {kind}." for kind in kinds]
    stories = talk(llm, *turns)
    said = [text for turn in zip(turns, stories, strict=True) for text in turn]
    before = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    before += [{"role": "user", "content": "My name is Anna."}, {"role": "assistant", "content": "Hello, Anna!"}]
    asked = ("Tell me a story about a wolf named Bruno.", "And then?", "What is my name?")
    told, more, name = talk(llm, *asked, before=before)
    last = llm.chat(before, SamplingParams(temperature=0, max_tokens=1))[0]
    assert 1500 < len(last.prompt_ids) < 1800, "the end of the context is near"
    assert "wolf" in told and "Bruno" in told and "Bruno" in more and "Anna" in name
    assert not any(map(behave.loops, [*stories, told, more]))


@pytest.mark.slow
def test_conversations_that_it_was_not_trained_on() -> None:
    """The counts of its card, over fewer conversations, sampled at temperature 0.3."""
    found = behave.behaviour(bundled.PLACE, num=20)
    bad = {name: found.pop(name) for name in ("stories that loop or do not end", "empty answers")}
    assert not any(bad.values()), bad
    assert min(found.values()) >= 0.95, found


def continuations() -> list[tuple[str, list[int]]]:
    rows = json.loads(PINNED.read_text())
    with LLM(bundled.folder(), max_num_seqs=4, max_num_batched_tokens=1024) as llm:
        params = SamplingParams(temperature=0, max_tokens=len(rows[0]["token_ids"]), ignore_eos=True)
        answers = [output.completions[0] for output in llm.generate([row["prompt"] for row in rows], params)]
    return [(answer.text, answer.token_ids) for answer in answers]
