"""benchmarks/loading.py on a small model: what it writes is a checkpoint, and what it compares can differ."""

from pathlib import Path

import pytest
import torch

from anabranch.loader.checkpoint import read_checkpoint
from benchmarks import loading

SMALL = {"vocab_size": 100, "hidden_size": 32, "head_dim": 8, "num_attention_heads": 4, "moe_intermediate_size": 16}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(loading, "CONFIG", {**loading.CONFIG, **SMALL, "num_experts": 4, "num_experts_per_tok": 2})
    monkeypatch.setattr(loading, "SHARD", 8_000)
    monkeypatch.setattr(loading, "POOL", 5_000)
    num_bytes = loading.write(tmp_path / "model", 1.0)
    checkpoint = read_checkpoint(tmp_path / "model")
    assert checkpoint.num_bytes == num_bytes and len(checkpoint.files) > 1
    return tmp_path / "model"


def test_what_is_written_is_loaded(folder: Path) -> None:
    model, copies, _, num_bytes = loading.load(folder, 2)
    assert num_bytes == read_checkpoint(folder).num_bytes
    assert loading.compare(model, copies, 10_000) == len(copies) + 2


def test_two_tensors_that_changed_places_are_seen(folder: Path) -> None:
    model, copies, _, _ = loading.load(folder, 1)
    experts = next(p for name, p in model.named_parameters() if name.endswith("gate_up_EFD.data"))
    with torch.no_grad():
        experts.copy_(experts.flip(0))
    with pytest.raises(AssertionError, match="gate_proj"):
        loading.compare(model, copies, 10_000)
