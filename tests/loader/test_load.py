"""Headers against the model: every tensor finds its place, and what does not come out even is refused in one line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anabranch import platforms
from anabranch.cli.main import main
from anabranch.config import EngineConfig
from anabranch.engine.engine import make_engine
from anabranch.formats import Grouped
from anabranch.loader import names
from anabranch.loader.checkpoint import CheckpointError, read_checkpoint
from anabranch.loader.load import build, load_model
from anabranch.models.config import read_config
from anabranch.models.decoder import Decoder, DecoderLayer
from anabranch.platforms.fake import FakePlatform
from tests.models import tiny

BY_NAME = {case.name: case for case in tiny.CASES}
ONE_OF_EACH = {case.model_type: case for case in reversed(tiny.CASES)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small qwen2_moe checkpoint, one tensor per expert."""
    case = next(c for c in tiny.CASES if c.model_type == "qwen2_moe" and c.experts == "split" and not c.sharded)
    return tiny.save(case, tmp_path / "model")


def change_tensors(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def an_expert_tensor(folder: Path) -> str:
    return next(name for name in read_checkpoint(folder).tensors if re.search(r"experts\.2\.up_proj", name))


def test_one_missing_expert_of_many(folder: Path) -> None:
    name = an_expert_tensor(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert str(caught.value) == (
        f"{folder / 'model.safetensors'}: tensor {name!r} is missing; is the checkpoint complete?"
    )


def test_missing_head(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    had_head = "lm_head.weight" in read_checkpoint(folder).tensors
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config))
    if had_head:
        change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' is missing"):
        load_model(folder)


def test_missing_tensor_of_a_sharded_checkpoint_names_the_folder(tmp_path: Path) -> None:
    case = next(case for case in tiny.CASES if case.sharded)
    folder = tiny.save(case, tmp_path / "model")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(name for name in index["weight_map"] if name.endswith("o_proj.weight"))
    shard = folder / index["weight_map"].pop(name)
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(f"{folder}: tensor {name!r} is missing")):
        load_model(folder)


def test_surplus_tensor(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert str(caught.value) == (
        f"{folder / 'model.safetensors'}: tensor 'model.layers.0.extra.weight' has no place in a qwen2_moe model of "
        "this config.json; do the two belong together?"
    )


def test_config_with_fewer_experts_than_the_checkpoint(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_experts"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"(has shape|has no place)"):
        load_model(folder)


def test_wrong_shape(folder: Path) -> None:
    name = an_expert_tensor(folder)
    shape = list(read_checkpoint(folder).tensors[name].shape)
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(shape[0] + 1, shape[1])}))
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert str(caught.value) == (
        f"{folder / 'model.safetensors'}: tensor {name!r} has shape [{shape[0] + 1}, {shape[1]}], "
        f"config.json asks for [{shape[0]}, {shape[1]}]; do the two belong together?"
    )


def test_refusals_come_before_memory_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(an_expert_tensor(folder)))
    monkeypatch.setattr(Decoder, "_apply", lambda *_, **__: pytest.fail("took memory before refusing"))
    with pytest.raises(CheckpointError):
        load_model(folder)


@pytest.mark.parametrize("model_type", ONE_OF_EACH)
def test_every_element_is_written_and_every_tensor_used(model_type: str, tmp_path: Path) -> None:
    folder = tiny.save(ONE_OF_EACH[model_type], tmp_path / "model")
    checkpoint, config = read_checkpoint(folder), read_config(folder)
    model = build(config, torch.float32)
    copies = names.match(model, checkpoint)
    filled = {name: torch.zeros(parameter.shape, dtype=torch.int) for name, parameter in model.named_parameters()}
    for copy in copies:
        filled[copy.parameter][copy.index] += 1
    assert all((count == 1).all() for count in filled.values())
    unused = {name for name in checkpoint.tensors if not name.startswith("model.visual.")}
    unused -= {copy.source.name for copy in copies}
    assert unused <= set(ONE_OF_EACH[model_type].extra_tensors) | {"lm_head.weight"}


def test_dtype_is_converted(folder: Path) -> None:
    whole, half = load_model(folder, dtype="float32"), load_model(folder, dtype="bfloat16")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    for (name, a), b in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name


def test_auto_dtype_follows_checkpoint_and_platform(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes in fp32, also where it has instructions for bf16."""

    class Chip(FakePlatform):
        def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
            return wanted

    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("anabranch.platforms.cpu.cpu_flags", lambda: frozenset({"avx512_bf16", "bf16"}))
    for platform, expected in ((platforms.make("cpu"), torch.float32), (Chip(), torch.bfloat16)):
        assert next(load_model(folder, platform=platform).parameters()).dtype == expected


class AnyDtype(FakePlatform):
    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        return wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("model_type", ["minimax_m2", "qwen3_moe", "qwen3_5_moe"])
def test_without_a_dtype_it_is_that_of_the_checkpoint(
    model_type: str, dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers' "auto"."""
    case = next(c for c in tiny.CASES if c.model_type == model_type)
    tiny.save(replace(case, dtype=dtype), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for part in (config, config.get("text_config", {}), config.get("vision_config", {})):
        part.pop("dtype", None), part.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = tiny.ARCHITECTURES[model_type][1].from_pretrained(tmp_path, dtype="auto").dtype
    assert str(theirs) == f"torch.{dtype}"
    model = load_model(tmp_path, platform=AnyDtype())
    assert model.embed_tokens.weight.dtype == theirs
    assert next(load_model(tmp_path, dtype="float32", platform=AnyDtype()).parameters()).dtype == torch.float32
    assert main(["plan", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == dtype
    default = torch.bfloat16 if model_type == "minimax_m2" else torch.float32
    dummy = load_model(tmp_path, load_format="dummy", platform=AnyDtype())
    assert next(dummy.parameters()).dtype == default
    if dtype == "bfloat16":  # whose matrices a CPU multiplies by in fp32
        runner = make_engine(EngineConfig(model=str(tmp_path), num_pages=8, tune="off")).runner
        assert runner.dtype == torch.float32
        assert runner.model.config.dtype == "bfloat16"


def test_unknown_dtype(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype 'int3' is not one of auto, float32, float16, bfloat16"):
        load_model(folder, dtype="int3")


def test_progress_counts_every_byte_once(folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(folder, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] <= read_checkpoint(folder).num_bytes


def test_dummy_weights_need_only_a_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    model = load_model(folder, dtype="float32", load_format="dummy")
    for name, parameter in model.named_parameters():
        assert parameter.abs().max() <= 1e-3, name
        assert parameter.numel() < 8 or parameter.std() > 2e-4, name
    again = load_model(folder, dtype="float32", load_format="dummy")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(("format", "form"), [("fp8", "groups"), ("int4", "parts"), ("fp4", "parts"), ("int8", "")])
def test_norms_know_how_their_rows_are_multiplied(format: str, form: str, folder: Path) -> None:
    """By the weights that read them: here those of the experts, not those of attention."""
    quantized = {
        "fp8": Grouped("fp8", 128, 128, "float32"),
        "int4": Grouped("int4", 1, 128, "bfloat16"),
        "fp4": Grouped("fp4", 1, 32, "uint8"),
        "int8": Grouped("int8", 1, 0, "float32"),
    }[format]
    layer = next(module for module in load_model(folder).modules() if isinstance(module, DecoderLayer))
    for weight in layer.mlp.experts.children():
        weight.format = quantized
    layer.set_fp8_norms()
    assert (layer.input_layernorm.fp8, layer.post_attention_layernorm.fp8) == ("", form)
