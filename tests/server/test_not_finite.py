"""A model that gives NaN for some prompts: an error for those who sent them, in whichever way they asked."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.server.serving import NAME, QUICK, Running, running, write_model

POISON = "Z"
"""The text whose embedding is NaN."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_model(tmp_path_factory.mktemp("not_finite") / NAME)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][vocabulary[POISON]] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with running(folder, "--num-pages", "300") as server:
        yield server


def test_error_log_line_and_metric(server: Running) -> None:
    good = server.complete(max_tokens=4)
    answer = server.post("/v1/completions", {"prompt": f"A {POISON}", "max_tokens": 4}, headers={"x-request-id": "abc"})
    assert answer.status_code == 500, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "the model's logits are NaN or infinite" in error["message"]
    assert answer.headers["x-should-retry"] == "false"
    assert server.wait_for(r"ERROR request cmpl-\S+: logits are NaN")
    assert server.wait_for(r"error=internal_error id=abc")
    chat = {"messages": [{"role": "user", "content": POISON}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", chat).status_code == 500
    assert server.post("/v1/messages", chat).status_code == 500
    assert server.complete(max_tokens=4) == good
    metrics = server.get("/metrics").text
    assert f'anabranch_nonfinite_logits_total{{model_name="{NAME}"}} 3.0' in metrics
    assert f'request_success_total{{finished_reason="error",model_name="{NAME}"}} 3.0' in metrics


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_a_stream_ends_with_an_error_event(server: Running, path: str) -> None:
    body = {"max_tokens": 4, "stream": True}
    body |= {"prompt": POISON} if path == "/v1/completions" else {"messages": [{"role": "user", "content": POISON}]}
    with httpx.stream("POST", server.url + path, json=body, timeout=QUICK) as answer:
        text = answer.read().decode()
    assert "logits are NaN or infinite" in text and '"error"' in text, text
    assert '"finish_reason":"stop"' not in text and '"stop_reason":"end_turn"' not in text
