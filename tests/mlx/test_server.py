"""`anabranch serve` on MLX with the bundled model, asked by the real openai client: the text of the torch path."""

# ruff: noqa: E402  (importorskip comes first: a machine without these packages skips this file)

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for package in ("mlx_lm", "fastapi", "uvicorn", "msgspec", "zmq", "prometheus_client", "httpx", "psutil"):
    pytest.importorskip(package, reason="needs an environment of its own: make test-mlx")
openai = pytest.importorskip("openai")

from mlx_lm import convert
from transformers import PreTrainedTokenizerFast

from anabranch import bundled
from anabranch.llm import LLM, SamplingParams
from tests.mlx.engines import on_platform
from tests.server.serving import QUICK, running, write_model

QUESTIONS = ["Tell me a story about a fox who shares berries.", "What is a river?", "Why do we sleep?"]


def test_the_server_answers_chats_on_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bundled.PLACE
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with on_platform("cpu"), LLM(str(folder), num_pages=256, max_num_seqs=4) as llm:
        expected = [llm.chat([{"role": "user", "content": said}], greedy)[0].text for said in QUESTIONS]
    monkeypatch.setenv("ANABRANCH_PLATFORM", "mlx")
    options: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
        "model": folder.name,
    }
    with running(folder, "--max-num-seqs", "4", "--num-pages", "256", "--reasoning-parser", "none") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=QUICK, max_retries=0) as client:

            def ask(said: str) -> str:
                answer = client.chat.completions.create(messages=[{"role": "user", "content": said}], **options)
                assert answer.usage.completion_tokens == 24
                return str(answer.choices[0].message.content)

            with ThreadPoolExecutor(3) as pool:
                assert list(pool.map(ask, QUESTIONS)) == expected
            messages = [{"role": "user", "content": QUESTIONS[0]}]
            parts = list(client.chat.completions.create(messages=messages, stream=True, **options))
            assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected[0]
            assert len(parts) > 5
        server.until_idle()
        maps = Path(f"/proc/{server.engine.pid}/maps")
        assert not maps.exists() or "libmlx" in maps.read_text(), "it was not MLX that answered"
        assert server.end() == 0


def test_the_server_takes_weights_that_mlx_has_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, packed = write_model(tmp_path / "source"), tmp_path / "packed"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"), eos_token="<|end|>")
    tokenizer.save_pretrained(source)  # convert wants one that transformers can load
    convert(str(source), str(packed), quantize=True, q_group_size=32, q_bits=4)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with on_platform("mlx"), LLM(str(packed), num_pages=256, max_num_seqs=4) as llm:
        expected = llm.generate(["A river"], [greedy])[0].text
    monkeypatch.setenv("ANABRANCH_PLATFORM", "mlx")
    with running(packed, "--max-num-seqs", "4", "--num-pages", "256") as server:
        assert server.complete("A river") == expected
        assert server.end() == 0
