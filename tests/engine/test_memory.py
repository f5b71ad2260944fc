"""What does not fit is refused before a weight is read or drawn, in one line: what is needed, what is free, what to
do."""

import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch import platforms
from anabranch.bench import offline
from anabranch.config import EngineConfig
from anabranch.engine import plan, torch_runner
from anabranch.engine.engine import make_engine
from anabranch.llm import LLM
from anabranch.models.config import read_config
from anabranch.platforms import Memory
from anabranch.platforms.cpu import CpuPlatform
from anabranch.platforms.fake import FakePlatform
from tools import tiny_model

CONFIG = Path(offline.__file__).with_name("configs") / "qwen3-30b-a3b"
GB = 10**9


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 GB, and whoever loads on it fails."""
    monkeypatch.setattr(CpuPlatform, "memory", lambda self: Memory(free=23 * GB, total=25 * GB))
    monkeypatch.setattr(platforms, "current", CpuPlatform)
    monkeypatch.setattr(torch_runner, "load_model", lambda *_, **__: pytest.fail("it is loaded"))


def test_a_large_model_on_a_small_machine_is_refused_at_once(small_machine: None) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="the model does not fit") as refused:
        LLM(str(CONFIG), load_format="dummy", dtype="bfloat16")
    assert time.monotonic() - began < 2
    text = str(refused.value)
    assert "61.1 GB of weights in bfloat16" in text and "may use 12.5 GB (23.0 of 25.0 GB are free" in text
    assert "anabranch plan" in text and "\n" not in text


def test_a_config_of_many_layers_is_refused_before_it_is_built(
    small_machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((CONFIG / "config.json").read_text()) | {"num_hidden_layers": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    began = time.monotonic()
    with pytest.raises(ValueError, match="the model does not fit"):
        make_engine(EngineConfig(model=str(tmp_path), load_format="dummy"))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("total", "words"), [(60, "6.* GB of weights in bfloat16"), (80, "")])
def test_matrices_in_bf16_count_as_such(total: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """62 GB of a model that is computed in fp32, where it would be 122."""
    monkeypatch.setattr(CpuPlatform, "memory", lambda self: Memory(free=total * GB, total=total * GB))
    monkeypatch.setattr(torch_runner, "load_model", lambda *_, **__: pytest.fail("it is loaded"))
    config = EngineConfig(model=str(CONFIG), load_format="dummy", dtype="float32", memory_fraction=0.9)
    expected = pytest.raises(ValueError, match=words) if words else pytest.raises(pytest.fail.Exception)
    with expected:
        make_engine(replace(config, max_num_batched_tokens=2048, max_num_seqs=64, max_model_len=2048))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_what_headers_say_counts_before_memory_is_taken(
    stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config.json may say bfloat16 of tensors in fp32."""
    tiny_model.write(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        save_file({name: tensor.to(stored) for name, tensor in load_file(file).items()}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16", "dtype": "bfloat16"}))
    asked: list[int] = []
    check = plan.check_memory

    def noted(*args: Any, weights: int | None = None, **kwargs: Any) -> None:
        asked.extend([weights] if weights is not None else [])
        check(*args, weights=weights, **kwargs)

    monkeypatch.setattr(plan, "check_memory", noted)
    engine = make_engine(EngineConfig(model=str(tmp_path), dtype="float32", num_pages=16))
    try:
        assert asked == [sum(parameter.nbytes for parameter in engine.runner.model.parameters())]  # type: ignore[attr-defined]
        model = plan.kept(read_config(tmp_path))
        assert plan.check_memory(model, engine.config, "float32", free=GB, total=GB, captured_tokens=0) is None
        with pytest.raises(ValueError, match="0.0 GB of weights, "):
            plan.check_memory(
                model, engine.config, "float32", free=asked[0], total=GB, captured_tokens=0, weights=asked[0]
            )
    finally:
        engine.close()


def options(**given: Any) -> EngineConfig:
    settings = {"max_model_len": 1000, "page_size": 16, "memory_fraction": 0.9, "max_num_batched_tokens": 2048}
    return EngineConfig(model="x", **(settings | given))


def test_the_arithmetic() -> None:
    """Of the same parts as `plan`: what it says fits is let through, a byte less is refused."""
    model = read_config(CONFIG)
    auto, given = options(), options(num_pages=100)
    found = plan.plan_memory(
        model, 200 * GB, fraction=0.9, dtype="bfloat16", max_num_batched_tokens=2048, captured_tokens=64
    )
    page = plan.request_bytes(model, 16, 16, "bfloat16")
    for one, needed in (
        (auto, found.weights + found.workspace + page),
        (given, found.weights + 100 * page),
    ):
        plan.check_memory(model, one, "bfloat16", free=needed, total=200 * GB, captured_tokens=64)
        with pytest.raises(ValueError, match="does not fit"):
            plan.check_memory(model, one, "bfloat16", free=needed - 1, total=200 * GB, captured_tokens=64)
    with pytest.raises(ValueError, match="may use 54.0 GB"):  # however much is free: the fraction
        plan.check_memory(model, auto, "bfloat16", free=60 * GB, total=60 * GB, captured_tokens=64)


def test_what_the_allocator_keeps_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model before, in the same process."""

    class Cached(FakePlatform):
        cached = 0

        def memory(self) -> Memory:
            return Memory(free=1 << 20, total=1 << 30, cached=self.cached)

    platform = Cached()
    monkeypatch.setattr(platforms, "current", lambda: platform)
    tiny_model.write(tmp_path / "tiny")
    config = EngineConfig(model=str(tmp_path / "tiny"), num_pages=64, max_num_seqs=4)
    with pytest.raises(ValueError, match="does not fit"):
        make_engine(config)
    platform.cached = 1 << 28
    make_engine(config).close()


def limited() -> None:
    """In the child: should it be loaded after all, it ends itself and not this machine."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["bench", "offline", "qwen3-30b-a3b", "--load-format", "dummy"], marks=pytest.mark.slow),
        ["generate", str(CONFIG), "x", "--load-format", "dummy"],
    ],
    ids=["bench offline", "generate"],
)
def test_commands_end_with_one_line(command: list[str]) -> None:
    if CpuPlatform().memory().free > 60 * GB or platforms.current().name != "cpu":
        pytest.skip("it may fit here")
    done = subprocess.run(
        [sys.executable, "-m", "anabranch.cli.main", *command], capture_output=True, text=True, preexec_fn=limited
    )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert "the model does not fit: it needs" in line


@pytest.mark.parametrize("platform", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_engine_that_is_closed_has_no_memory(platform: str, tmp_path: Path) -> None:
    """Another one may follow while a variable still refers to it."""
    tiny_model.write(tmp_path)
    with LLM(tmp_path, num_pages=64, max_model_len=64) as llm:
        model = llm.engine.runner.model  # type: ignore[attr-defined]
        kept = [*model.parameters(), *model.buffers()]
        kept += [tensor for cache in llm.engine.runner.kv for tensor in cache] * (platform != "cpu")  # type: ignore[attr-defined]
        assert all(tensor.device.type == platform and tensor.untyped_storage().nbytes() for tensor in kept)
    assert not any(tensor.untyped_storage().nbytes() for tensor in kept)
    with pytest.raises(ValueError, match="the engine is closed"):
        llm.generate([[1, 2, 3]])
