"""The format that docs/adding_a_format.md adds, as the page shows it: a quantised checkpoint against its plain twin."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from anabranch import ops
from anabranch.engine import plan
from anabranch.engine.single import SingleSequence
from anabranch.formats import Format, format, source
from anabranch.loader import load
from anabranch.loader.checkpoint import CheckpointError
from anabranch.loader.load import load_model
from anabranch.models.config import read_config
from anabranch.models.keys import ConfigError
from anabranch.ops.weight import Weight
from tests.models import tiny

PAGE = Path(__file__).parents[2] / "docs" / "adding_a_format.md"
CASE = next(case for case in tiny.CASES if case.model_type == "qwen2_moe")
PLAIN = ("embed_tokens", "lm_head", "norm", "gate.weight", "bias", "shared_expert_gate")
"""Parts of the names of tensors that stay as they are."""


def run_block(file: str, known: dict[str, Any] | None = None) -> dict[str, Any]:
    found = re.search(rf"^\*\*{re.escape(file)}\*\*\n\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None, file
    module = dict(known or {})
    exec(found[1], module)
    return module


@pytest.fixture
def int8(monkeypatch: pytest.MonkeyPatch) -> Format:
    monkeypatch.setattr(format, "_registered", dict(format._registered))
    monkeypatch.setattr(source, "_registered", dict(source._registered))
    module = run_block("src/anabranch/formats/int8_rows.py")
    method = run_block("src/anabranch/formats/methods/int8_rows.py", module)
    source.register_method(method["NAME"], method["sources"])
    made: Format = module["INT8_ROWS"]
    return made


@pytest.fixture
def folders(int8: Format, tmp_path: Path) -> tuple[Path, Path]:
    """(a quantised checkpoint, the same numbers in plain weights)"""
    plain = tiny.save(CASE, tmp_path / "plain")
    quantized = tmp_path / "quantized"
    shutil.copytree(plain, quantized)
    for file in plain.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        twins, packed = {}, {}
        for name, tensor in tensors.items():
            if any(part in name for part in PLAIN):
                packed[name] = twins[name] = tensor
            else:
                made = int8.quantize(tensor)
                packed |= {name: made["data"], f"{name}_scale": made["scale"]}
                twins[name] = int8.dequantize(made, tuple(tensor.shape), torch.float32)
        safetensors.torch.save_file(packed, quantized / file.name)
        safetensors.torch.save_file(twins, file)
    (quantized / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "int8_rows"}}))
    return quantized, plain


def logits(folder: Path) -> torch.Tensor:
    return SingleSequence(load_model(folder, dtype="float32"), 64).forward(tiny.prompt(CASE))


@pytest.fixture
def as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay quantised although no kernel takes them: the references multiply by them."""
    monkeypatch.setattr(load, "settle", lambda *_: None)


def test_dequantised_once(folders: tuple[Path, Path]) -> None:
    quantized, plain = folders
    torch.testing.assert_close(logits(quantized), logits(plain), rtol=0, atol=1e-4)
    weights = [module for module in load_model(quantized, dtype="float32").modules() if isinstance(module, Weight)]
    assert {weight.format.name for weight in weights} == {"plain"}


@pytest.mark.usefixtures("as_loaded")
def test_the_same_logits_as_the_plain_twin(folders: tuple[Path, Path], int8: Format) -> None:
    quantized, plain = folders
    torch.testing.assert_close(logits(quantized), logits(plain), rtol=0, atol=1e-4)
    model = load_model(quantized, dtype="float32")
    weights = {name: module for name, module in model.named_modules() if isinstance(module, Weight)}
    formats = {name.rpartition(".layers.")[2]: weight.format.name for name, weight in weights.items()}
    assert formats["embed_tokens.weight"] == "plain" and formats["layers.0.mlp.router.weight"] == "plain"
    assert formats["layers.0.self_attn.qkv_proj.weight"] == formats["layers.0.mlp.experts.down_EDI"] == "int8_rows"


@pytest.mark.usefixtures("as_loaded")
def test_the_plan_knows_its_bytes(folders: tuple[Path, Path]) -> None:
    quantized, plain = (read_config(folder) for folder in folders)
    assert quantized.sources and not plain.sources
    found, whole = plan.weight_bytes(quantized, "float32"), plan.weight_bytes(plain, "float32")
    model = load_model(folders[0], dtype="float32")
    experts = [module for name, module in model.named_modules() if isinstance(module, Weight) and ".experts." in name]
    assert found["routed experts"] == sum(weight.nbytes for weight in experts) < whole["routed experts"] / 3
    assert found["embeddings"] == whole["embeddings"]


@pytest.mark.usefixtures("as_loaded")
def test_a_kernel_accepts_it(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(folders[0])
    monkeypatch.setattr(ops.linear, "kernels", dict(ops.linear.kernels))
    kernel = run_block("src/anabranch/kernels/torch/linear_int8.py")
    registered, calls = ops.linear.kernels["torch_int8"], list[int]()

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return kernel["linear"](*args, **kwargs)

    model = load_model(folders[0], dtype="float32")
    with monkeypatch.context() as bound:
        bound.setattr(ops.linear, "bound", (dataclasses.replace(registered, function=counted), *ops.linear.bound))
        found = SingleSequence(model, 64).forward(tiny.prompt(CASE))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert len(calls) >= 2 * len(model.layers), "QKV and O of every layer"


def test_damage_is_refused_by_name(folders: tuple[Path, Path]) -> None:
    file = next(folders[0].glob("*.safetensors"))
    tensors = safetensors.torch.load_file(file)
    scale = next(
        name for name in tensors if name.endswith("down_proj.weight_scale") or name.endswith("down_proj_scale")
    )
    kept = tensors.pop(scale)
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"down_proj.*_scale' is missing"):
        load_model(folders[0])
    safetensors.torch.save_file(tensors | {scale: kept[:-1].clone()}, file)
    with pytest.raises(CheckpointError, match=r"_scale' has shape .*, config.json asks for"):
        load_model(folders[0])


def test_without_it_the_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "quantization_config": {"quant_method": "int8_rows"}}'
    )
    with pytest.raises(ConfigError, match="'quantization_config': quant_method 'int8_rows' is not supported"):
        read_config(tmp_path)
