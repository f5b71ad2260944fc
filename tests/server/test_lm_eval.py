"""lm-eval itself, from its own environment, on two small local tasks: what it measures is what the engine says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from anabranch.llm import LLM, SamplingParams
from tests.server.serving import NAME, QUICK, ROOT, running

QUESTIONS: list[dict[str, Any]] = [
    {"text": "The river joins", "choices": [" the sea", " a hill"], "gold": 0},
    {"text": "A stream that leaves", "choices": [" comes back", " is dry", " sings"], "gold": 1},
]
STOPS = ["###", "Q:", "</s>", "The end", "\n\n\n"]  # with one that is said, more than OpenAI's four
LIKELIHOODS = """\
task: rivers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_target: gold
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
TEXTS = """\
task: streams
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: {stops}, max_gen_toks: 24, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def lm_eval() -> str:
    """The command. It brings half of the world with it, so it does not live among our own packages."""
    found = shutil.which("lm-eval", path=f"{ROOT / '.venv-lm-eval' / 'bin'}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        reason = "needs lm-eval; run: make .venv-lm-eval/.installed"
        if os.environ.get("ANABRANCH_TEST_ALL") == "1":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


def greedy_question(llm: LLM) -> dict[str, Any]:
    """One whose first choice is what the model would say, so that there is something greedy to be found."""
    texts = [f"Stream {number} goes" for number in range(200)]
    for text, output in zip(texts, llm.generate(texts, SamplingParams(temperature=0, max_tokens=2))):
        if output.text.isascii() and output.text.isalnum() and len(output.text) == 2:
            return {"text": text, "choices": [output.text, "zz"], "gold": 0}
    raise AssertionError("the model never says two letters")


def evaluate(
    lm_eval: str, model: Path, asked: list[dict[str, Any]], stops: list[str], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Task → its samples, in the order asked."""
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, asked)))
    (folder / "rivers.yaml").write_text(LIKELIHOODS.format(file=questions))
    (folder / "streams.yaml").write_text(TEXTS.format(file=questions, stops=json.dumps(stops)))
    with running(model, "--num-pages", "300") as server:
        arguments = f"model={NAME},base_url={server.url}/v1/completions,tokenizer={model},num_concurrent=2"
        command = [lm_eval, "run", "--model", "local-completions", "--model_args", f"{arguments},max_length=2048"]
        command += ["--tasks", "rivers,streams", "--include_path", str(folder), "--batch_size", "2"]
        command += ["--log_samples", "--output_path", str(folder / "out")]
        here = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | here
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=5 * QUICK)
        assert done.returncode == 0, done.stderr
        server.until_idle()
    samples = {}
    for task in ("rivers", "streams"):
        (file,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        found = map(json.loads, file.read_text().splitlines())
        samples[task] = sorted(found, key=lambda sample: int(sample["doc_id"]))
        assert len(samples[task]) == len(asked)
    return samples


@pytest.mark.slow
def test_its_figures_are_the_engines(lm_eval: str, model: Path, tmp_path: Path) -> None:
    with LLM(str(model), max_num_seqs=4, num_pages=300) as llm:
        asked = [*QUESTIONS, greedy_question(llm)]
        params = SamplingParams(temperature=0, max_tokens=24)
        unstopped = [output.text for output in llm.generate([question["text"] for question in asked], params)]
        said = next(letter for letter in unstopped[0][1:] if letter.isascii() and letter.isalnum())
        samples = evaluate(lm_eval, model, asked, [*STOPS, said], tmp_path)
        all_greedy = []
        for question, sample in zip(asked, samples["rivers"]):
            assert len(sample["resps"]) == len(question["choices"])
            for choice, (answer,) in zip(question["choices"], sample["resps"]):
                likelihood, greedy = float(answer[0]), str(answer[1]) == "True"
                (output,) = llm.generate(question["text"] + choice, SamplingParams(max_tokens=1, prompt_logprobs=1))
                assert output.prompt_logprobs is not None
                own = [one for one in output.prompt_logprobs[len(question["text"]) :] if one is not None]
                assert len(own) == len(choice)
                assert likelihood == pytest.approx(sum(one.logprob for one in own), abs=1e-3)
                assert greedy == all(one.rank == 1 for one in own)
                all_greedy.append(greedy)
        assert all_greedy == [False] * 5 + [True, False]
        cut = [text.partition(said)[0] for text in unstopped]
        assert cut != unstopped and [sample["resps"] for sample in samples["streams"]] == [[[text]] for text in cut]
