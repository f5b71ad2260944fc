"""generation_config.json gives the sampling of requests that name none: offline, on the command line, over HTTP.

With `top_k: 1` in the file every default answer is the greedy one, whatever the temperature and the seed.
"""

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from anabranch.cli.main import main
from anabranch.config import EngineConfig
from anabranch.llm import LLM, SamplingParams
from anabranch.models.generation import read_sampling_defaults
from anabranch.server.lifecycle import read_model
from anabranch.server.settings import Settings
from tests.server.serving import running, write_model

BEST = {"eos_token_id": 256, "do_sample": True, "temperature": 1.5, "top_k": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=128)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("generation") / "noise")
    (folder / "generation_config.json").write_text(json.dumps(BEST))
    return folder


def defaults(folder: Path, content: dict[str, Any], generation_config: str = "auto") -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return read_sampling_defaults(folder, generation_config)


def test_what_is_read(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    every = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    assert defaults(tmp_path, every | {"do_sample": True, "max_new_tokens": 7, "pad_token_id": 0}) == every
    assert defaults(tmp_path, every) == every  # without do_sample the numbers hold too
    assert defaults(tmp_path, every | {"do_sample": False}) == {"temperature": 0.0, "repetition_penalty": 1.05}
    assert defaults(tmp_path, {"temperature": None, "top_k": 0}) == {"top_k": 0}
    assert defaults(tmp_path, every, "none") == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.5),
        ("top_p", 0),
        ("top_k", 2.5),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("do_sample", "yes"),
    ],
)
def test_value_out_of_range_is_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=key) as caught:
        defaults(tmp_path, {key: value})
    message = str(caught.value)
    assert "generation_config.json: " in message and "\n" not in message
    assert defaults(tmp_path, {key: value}, "none") == {}


def test_file_that_is_refused_is_refused_before_weights_are_read(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text('{"top_p": 7}')
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="generation_config.json: top_p must lie in"):
        LLM(str(tmp_path), num_pages=64)


def test_offline(model: Path) -> None:
    with LLM(str(model), num_pages=64, max_num_seqs=4) as llm:
        (greedy,) = llm.generate("A river", GREEDY)
        assert llm.default_params == SamplingParams(temperature=1.5, top_k=1)
        (by_default,) = llm.generate("A river")
        assert by_default.token_ids == greedy.token_ids
        (short,) = llm.generate("A river", replace(llm.default_params, max_tokens=7))
        assert short.token_ids == greedy.token_ids[:7]
        (as_given,) = llm.generate("A river", SamplingParams())  # taken as it is: temperature 1, all tokens
        assert as_given.token_ids != greedy.token_ids

        async def stream() -> list[int]:
            return [token async for delta in llm.stream("A river") for token in delta.token_ids]

        assert asyncio.run(stream()) == greedy.token_ids


def test_offline_turned_off(model: Path) -> None:
    with LLM(str(model), num_pages=64, max_num_seqs=4, generation_config="none") as llm:
        assert llm.default_params == SamplingParams()
    with LLM(str(model), num_pages=64, max_num_seqs=4, generation_config="vllm") as llm:  # its word for none
        assert llm.default_params == SamplingParams()
    with pytest.raises(ValueError, match="generation_config must be one of auto, model, none"):
        LLM(str(model), generation_config="sometimes")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_command_line(
    command: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def anabranch(*options: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("A river\n"))
        words = ["-", "--quiet"] if command == "generate" else []
        assert main([command, str(model), *words, "--max-tokens", "24", "--seed", "7", *options]) == 0
        return capsys.readouterr().out

    greedy = anabranch("--temperature", "0")
    assert anabranch() == greedy
    assert anabranch("--top-k", "0") != greedy
    assert anabranch("--generation-config", "none", "--temperature", "1.5") != greedy


def test_over_http(model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "A river"}], "max_tokens": 24}
    routes = {
        "/v1/completions": {"prompt": "A river", "max_tokens": 24},
        "/v1/chat/completions": chat,
        "/v1/messages": chat | {"model": "noise"},
    }

    def text(answer: dict[str, Any]) -> str:
        answer = answer["choices"][0] if "choices" in answer else answer
        return json.dumps(answer.get("text") or answer.get("message") or answer["content"])

    with running(model) as server:
        for route, body in routes.items():
            greedy, by_default, asked = (
                text(server.post(route, body | more).json()) for more in ({"temperature": 0}, {}, {"top_k": 0})
            )
            assert by_default == greedy, route
            assert asked != greedy, route


def test_server_turned_off(model: Path) -> None:
    found = {
        choice: dict(read_model(EngineConfig(model=str(model), generation_config=choice), Settings()).sampling_defaults)
        for choice in ("auto", "model", "none")
    }
    assert found == {"auto": {"temperature": 1.5, "top_k": 1}, "model": {"temperature": 1.5, "top_k": 1}, "none": {}}
