"""lm-eval's own client on a small local task: its log-likelihoods are the engine's."""

# ruff: noqa: E402  (importorskip comes first: a machine without these packages skips this file)

from __future__ import annotations

import json
from pathlib import Path

import pytest

for package in ("fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client", "httpx", "psutil"):
    pytest.importorskip(package)
lm_eval = pytest.importorskip("lm_eval")

from anabranch.llm import LLM, SamplingParams
from tests.server.serving import NAME, model, running

__all__ = ["model"]

QUESTIONS = [
    {"text": "The river joins", "choices": [" the sea", " a hill"], "gold": 0},
    {"text": "A stream that leaves", "choices": [" comes back", " is dry", " sings"], "gold": 1},
]
TASK = """\
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


@pytest.mark.slow
def test_log_likelihoods_are_the_engines(model: Path, tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    (tmp_path / "questions.json").write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "rivers.yaml").write_text(TASK.format(file=tmp_path / "questions.json"))
    with running(model, "--num-pages", "300") as server:
        found = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": NAME,
                "base_url": f"{server.url}/v1/completions",
                "tokenizer": str(model),
                "num_concurrent": 1,
                "max_length": 2048,
            },
            tasks=["rivers"],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
        )
    samples = sorted(found["samples"]["rivers"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(QUESTIONS)
    with LLM(str(model), max_num_seqs=4, num_pages=300) as llm:
        for question, sample in zip(QUESTIONS, samples):
            for choice, (answer,) in zip(question["choices"], sample["resps"]):
                likelihood, greedy = (float(answer[0]), str(answer[1]) == "True")
                prompt = question["text"] + choice
                (output,) = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
                assert output.prompt_logprobs is not None
                own = [one for one in output.prompt_logprobs[len(question["text"]) :] if one is not None]
                assert likelihood == pytest.approx(sum(one.logprob for one in own), abs=1e-3)
                assert greedy == all(one.rank == 1 for one in own)
