"""Tuning at start: only where kernels have tiles, for the shapes the model has; and never the end of a start."""

import importlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anabranch import ops
from anabranch.loader.load import load_model
from anabranch.moe import tuning
from anabranch.platforms.fake import FakePlatform
from tests.models import tiny

BY_NAME = {case.name: case for case in tiny.CASES}


class Tuner:
    """Replaces experts_tuner."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.asked: list[Any] = []
        self.fault = fault

    @staticmethod
    def Shape(*shape: Any) -> Any:
        return shape

    def ensure(self, shape: Any, weights: Any, *rest: Any) -> Any:
        self.asked.append((shape, len(weights), *rest))
        if self.fault is not None:
            raise self.fault
        return SimpleNamespace(measured=(1, 16), seconds=2.5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    settings = tiny.QWEN2_MOE | {"shared_expert_intermediate_size": 48}
    return tiny.save(tiny.Case(name="x", model_type="qwen2_moe", settings=settings), tmp_path / "model")


def with_tuner(monkeypatch: pytest.MonkeyPatch, tuner: Tuner) -> Tuner:
    monkeypatch.setattr(tuning.importlib, "import_module", lambda name: tuner)
    monkeypatch.setattr(ops.experts, "bound", (SimpleNamespace(tuner="the.tuner"),))
    return tuner


def test_on_a_cpu_it_never_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder)  # binds the CPU's kernels
    monkeypatch.setattr(tuning.importlib, "import_module", lambda name: pytest.fail("asked for a tuner"))
    assert tuning.find_tuner() is None
    for level in ("off", "fast", "full"):
        assert tuning.tune(model, FakePlatform(), level, 8192) == []


def test_kernels_in_triton_name_their_tuner_and_traits() -> None:
    pytest.importorskip("triton")
    importlib.import_module("anabranch.kernels.triton")
    kernel = ops.experts.kernels["triton"]
    assert callable(importlib.import_module(kernel.tuner).ensure)
    assert "unreduced_rows" in kernel.traits and "sums_rows" in ops.sum_add_rms_norm.kernels["triton"].traits


def test_each_shape_is_asked_for_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(folder)
    tuner = with_tuner(monkeypatch, Tuner())
    platform = FakePlatform()
    assert tuning.tune(model, platform, "off", 8192) == [] and not tuner.asked
    said = tuning.tune(model, platform, "fast", 512)
    assert len(said) == 1 and "2 token counts" in said[0] and "2.5 s" in said[0]
    dtype = model.embed_tokens.weight.dtype
    assert tuner.asked == [((6, 32, 24, 2, dtype, "plain"), 3, "silu", platform, "fast", 512, None)], (
        "three layers' weights"
    )


@pytest.mark.parametrize("fault", [RuntimeError("no ptxas"), OSError("disk full"), torch.cuda.OutOfMemoryError("no")])
def test_a_tuner_that_fails_does_not_stop_a_start(
    fault: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(folder)
    with_tuner(monkeypatch, Tuner(fault))
    with caplog.at_level(logging.WARNING):
        assert tuning.tune(model, FakePlatform(), "fast", 8192) == []
    assert "the built-in tiles are used" in caplog.text


def test_a_model_without_experts_has_nothing_to_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in tiny.CASES if case.model_type == "llama")
    model = load_model(tiny.save(case, tmp_path / "model"))
    tuner = with_tuner(monkeypatch, Tuner())
    assert tuning.tune(model, FakePlatform(), "fast", 8192) == [] and not tuner.asked
