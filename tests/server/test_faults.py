"""Faults of the model (what it writes, what is in its folder) and of a machine where nothing can be kept."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anabranch.server.openai import ChatAnswer
from anabranch.server.parsers.choose import find_parsers
from anabranch.server.parsers.parts import ToolSpec
from anabranch.server.parsers.reader import Reader
from anabranch.server.protocol import ChatCompletion, Message
from tests.server.serving import QUICK, ROOT, TEMPLATE, Running, Unharmed, running, write_model

TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
GOOD = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
BROKEN = [
    '<tool_call>\n{"name": "get_time", "arguments": {"zone": tru}}\n</tool_call>',
    '<tool_call>\n{"name": "get_time", "arguments": {"zone": "C',
    '<tool_call>\n{"name": "get_time"}\n</tool_call>',
    '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call> so there',
    '<tool_call>\n{"arguments": {}, "name": 7}\n</tool_call>',
    "<tool_call>[1, 2]</tool_call> and on",
    "<tool_call></tool_call>",
    "<tool_call>",
    "</tool_call>\n<tool_cal",
    f'Well: {GOOD} <tool_call>{{"name": "get_time", "arguments": "{{}}"}}</tool_call>{{"',
]


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, "--max-num-seqs", "8", "--num-pages", "300", "--reasoning-parser", "none") as server:
        yield server


def whole_and_streamed(client: Any, text: str) -> list[tuple[str, str, str]]:
    """Content, calls and why it ended, of an answer that must read so: a grammar leaves the model no choice."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "When?"}], "tools": [TOOL], "max_tokens": 200}
    body |= {"structured_outputs": {"choice": [text]}, "temperature": 0}
    (choice,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    message = choice["message"]
    called = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or []]
    answer = client.post("/v1/chat/completions", json=body | {"stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in answer.text.split("\n\n")[:-2]]
    content, streamed = joined([chunk["choices"][0]["delta"] for chunk in chunks])
    (reason,) = (reason for chunk in chunks if (reason := chunk["choices"][0]["finish_reason"]))
    return [(message["content"] or "", json.dumps(called), choice["finish_reason"]), (content, streamed, reason)]


def joined(deltas: list[dict[str, Any]]) -> tuple[str, str]:
    """Content and calls, as a client puts them together."""
    content, calls = "", list[list[str]]()
    for delta in deltas:
        content += delta.get("content") or ""
        for call in delta.get("tool_calls") or []:
            if "name" in call["function"]:
                assert call["index"] == len(calls)
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return content, json.dumps(calls)


def test_a_broken_call_streams_as_it_is_whole(server: Running) -> None:
    unharmed = Unharmed(server)
    with httpx.Client(base_url=server.url, timeout=QUICK) as client, ThreadPoolExecutor(8) as pool:
        (whole, streamed), *others = pool.map(partial(whole_and_streamed, client), (GOOD, *BROKEN))
        assert whole == streamed == ("", json.dumps([["get_time", '{"zone": "CET"}']]), "tool_calls")
        for text, (whole, streamed) in zip(BROKEN, others, strict=True):
            assert whole == streamed, text
            assert whole[2] == ("stop" if whole[1] == "[]" else "tool_calls"), whole
    unharmed.check()


@given(st.sampled_from([GOOD, *BROKEN]), st.lists(st.integers(1, 200), min_size=1))
def test_however_the_engine_cuts_it(text: str, lengths: list[int]) -> None:
    """A slow reader gets many tokens in one chunk."""
    parsers = find_parsers(TEMPLATE, reasoning_parser="none")
    answer = ChatAnswer.__new__(ChatAnswer)  # its service is not needed to write a delta
    answer.body = ChatCompletion(messages=[Message(role="user", content="When?")])

    def reader() -> Reader:
        return parsers.start([ToolSpec("get_time", {"type": "object"})], "auto", reasoning=True)

    streamed, deltas, rest = reader(), list[dict[str, Any]](), text
    whole = answer.message(reader().feed(text, final=True))
    for length in cycle(lengths):
        piece, rest = rest[:length], rest[length:]
        deltas.append(answer.message(streamed.feed(piece, final=not rest)))
        if not rest:
            break
    assert joined(deltas) == joined([whole])


# The folder and the machine.


def start(folder: Path | str, **environment: str) -> tuple[int, str]:
    """Exit code and last line of a server that cannot start."""
    command = [sys.executable, "-m", "anabranch.cli.main", "serve", str(folder), "--port", "0"]
    known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=QUICK, env=known | environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_missing_shard(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + ('layers.3' in name)}-of-00002.safetensors" for name in tensors}
    first = {name: tensor for name, tensor in tensors.items() if shards[name].startswith("model-00001")}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    code, said = start(folder)
    assert code == 1 and said.startswith("anabranch serve: ") and "model-00002-of-00002.safetensors" in said


@pytest.mark.parametrize("start_of_file", [b"\xff" * 8, b"\x10\0\0\0\0\0\0\0not a header", b""])
def test_a_corrupt_file(tmp_path: Path, start_of_file: bytes) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(start_of_file)
    code, said = start(folder)
    assert code == 1 and said.startswith("anabranch serve: ") and "model.safetensors" in said


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


def test_nothing_in_the_folder_is_run(tmp_path: Path) -> None:
    folder, proof = write_model(tmp_path / "model"), tmp_path / "proof"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Evil(proof)))
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil", "conftest", "sitecustomize", "torch"):
        (folder / f"{name}.py").write_text(f"import os\nos.mkdir({str(proof)!r})\n")
    kinds = {"AutoConfig": "configuration_evil.E", "AutoModelForCausalLM": "modeling_evil.E"}
    kinds |= {"AutoTokenizer": ["tokenization_evil.E", None]}
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        known = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(known | {"auto_map": kinds}))
    with running(folder, "--num-pages", "300") as server:
        assert server.complete()
    assert not proof.exists()
    pickle.loads((folder / "optimizer.pt").read_bytes())
    assert proof.exists(), "it would have been seen"


def test_a_machine_that_keeps_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches in a place where no folder can be: none is needed to serve a folder, and a model by its name says so."""
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "cache")
    names = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "ANABRANCH_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    for name in names:
        monkeypatch.setenv(name, nowhere)
    with running(model, "--num-pages", "300") as server:
        Unharmed(server).check()
    code, said = start("somebody/some-model")
    assert code == 1 and said.startswith("anabranch serve: ") and "somebody/some-model" in said
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    code, said = start("somebody/some-model")
    assert code == 1 and said.startswith("anabranch serve: ") and "somebody/some-model" in said
