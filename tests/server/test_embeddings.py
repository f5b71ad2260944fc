"""/v1/embeddings with the real openai client: the vectors of the offline engine, in every form of input and output."""

from __future__ import annotations

import json
import re
import socket
from array import array
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from anabranch.llm import LLM
from tests.server.serving import NAME, QUICK, Running, running

TEXTS = ["Where does the river go?", "A", "Down to the sea. " * 20]
IDS = [list(text.encode()) for text in TEXTS]  # not the tokens of these texts, but tokens


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    flags = ("--max-num-seqs", "8", "--max-queue", "24", "--num-pages", "600", "--max-num-batched-tokens", "256")
    with running(model, *flags, "--pooling", "mean") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=QUICK, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def offline(model: Path) -> Iterator[LLM]:
    with LLM(model, num_pages=600) as llm:
        yield llm


def vectors(answer: Any) -> list[list[float]]:
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return [one.embedding for one in answer.data]


def near(found: list[list[float]]) -> Any:
    return [pytest.approx(one, abs=1e-5) for one in found]


def test_every_form_of_input_and_output(client: Any, offline: LLM) -> None:
    answer = client.embeddings.create(model=NAME, input=TEXTS, user="me")  # as base64, which the client decodes
    assert vectors(answer) == near(offline.embed(TEXTS, pooling="mean"))
    assert (answer.object, answer.model, answer.data[0].object) == ("list", NAME, "embedding")
    num_tokens = sum(len(offline.tokenizer.encode(text)) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)

    last = {"encoding_format": "float", "extra_body": {"pooling": "last"}}
    assert vectors(client.embeddings.create(model=NAME, input=TEXTS[0], **last)) == near(offline.embed(TEXTS[0]))
    assert vectors(client.embeddings.create(model=NAME, input=IDS, **last)) == near(offline.embed(IDS))
    short = client.embeddings.create(model=NAME, input=IDS[0], dimensions=16, **last)
    assert vectors(short) == near(offline.embed(IDS[0], dimensions=16)) and len(vectors(short)[0]) == 16


def test_base64_is_little_endian_fp32(server: Running) -> None:
    float_, base64_ = (
        server.post("/v1/embeddings", {"input": "A", "encoding_format": form}).json()["data"][0]["embedding"]
        for form in ("float", "base64")
    )
    assert array("f", b64decode(base64_)).tolist() == pytest.approx(float_)
    assert sum(number * number for number in float_) == pytest.approx(1)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "is empty"),
        ({"input": []}, "input", "is empty"),
        ({"input": ["A", ""]}, "input", r"input[1] is empty"),
        ({"input": [{"text": "A"}]}, "input", "must be text or token ids"),
        ({"input": [1, -1]}, "input", "integers from 0 on"),
        ({"input": [999999]}, "input", "999999 is not in the vocabulary"),
        ({"input": ["A"] * 1025}, "input", "at most 1024"),
        ({"input": ["A"] * 33}, "input", "the number of prompts is 33; this server takes 32"),
        ({"input": [1] * 2049}, "input", "the prompt has 2049 tokens. Shorten"),
        ({"input": "A", "dimensions": 65}, "dimensions", "must lie in [1, 64]"),
        ({"input": "A", "pooling": "cls"}, "pooling", ""),
        ({"input": "A", "encoding_format": "int8"}, "encoding_format", ""),
        ({"input": "A", "truncate_prompt_tokens": 4}, "truncate_prompt_tokens", "never truncated"),
        ({"input": "A", "temperature": 0}, "temperature", "unknown field"),
        ({}, "input", "missing"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_refusals(server: Running, body: dict[str, Any], param: str, words: str) -> None:
    answer = server.post("/v1/embeddings", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"], error
    if "2049" in words:
        assert error["code"] == "context_length_exceeded"


def test_they_run_beside_chats_and_end_with_their_client(server: Running) -> None:
    expected = server.complete()
    body = json.dumps({"input": [[number % 250] * 2048 for number in range(24)]}).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        server.until(lambda: server.stats()["running"] > 0, "no embedding runs")
        assert server.complete(priority=-1) == expected
    server.until_idle()
    ends = re.findall(r'request_success_total{.*finished_reason="(\w+)".*} (\S+)', server.get("/metrics").text)
    assert float(dict(ends)["abort"]) > 0 and "error" not in dict(ends)
    assert "v1/embeddings" in server.get("/openapi.json").text
