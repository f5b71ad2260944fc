"""`tie_word_embeddings` against what the checkpoint holds: as transformers does, a head of its own is used."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch.engine.single import SingleSequence
from anabranch.loader.checkpoint import CheckpointError
from anabranch.loader.load import load_model
from tests.models import tiny

FAMILIES = ("llama", "gemma4_text", "gemma4")


def save(folder: Path, family: str) -> dict[str, torch.Tensor]:
    tiny.save(tiny.case(family, settings={"num_hidden_layers": 2, "tie_word_embeddings": True}), folder)
    tensors = load_file(folder / "model.safetensors")
    assert not any("lm_head" in name for name in tensors)
    return tensors


def embedding(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))


@pytest.mark.parametrize("family", FAMILIES)
def test_head_of_its_own_is_used(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = save(tmp_path, family)
    head = torch.randn(embedding(tensors).shape, generator=torch.Generator().manual_seed(7))
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = list(range(20))
    expected = tiny.Judge(tmp_path, family).logits(tokens)
    with caplog.at_level(logging.WARNING):
        model = load_model(tmp_path, dtype="float32")
    logits = SingleSequence(model, max_length=32).forward(tokens)
    assert (logits - expected).abs().amax() < 1e-4
    assert "tie_word_embeddings" in caplog.text and "lm_head.weight" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_copy_of_the_embedding_stays_tied(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = save(tmp_path, family)
    head = embedding(tensors).clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(tmp_path, dtype="float32")
    assert model.lm_head is None
    assert "tie_word_embeddings" not in caplog.text


def test_head_with_a_bias_is_refused(tmp_path: Path) -> None:
    tensors = save(tmp_path, "llama")
    bias = torch.ones(tiny.VOCAB_SIZE)
    save_file(tensors | {"lm_head.bias": bias}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.bias"):
        load_model(tmp_path, dtype="float32")
