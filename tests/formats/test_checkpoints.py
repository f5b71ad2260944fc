"""Every format of quantised checkpoints against its dequantised twin, which transformers runs."""

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from anabranch import formats, platforms
from anabranch.cli.main import main
from anabranch.cli.write_quantized import quantize
from anabranch.engine.single import SingleSequence
from anabranch.formats import Grouped, rounded
from anabranch.formats.methods import gptq
from anabranch.loader import names
from anabranch.loader.checkpoint import CheckpointError, read_checkpoint
from anabranch.loader.load import build, load_model
from anabranch.loader.read import read_weights
from anabranch.models.config import read_config
from anabranch.models.decoder import Decoder
from anabranch.models.keys import ConfigError
from anabranch.ops.weight import Weight
from tests.models import tiny

pytest.importorskip("compressed_tensors")
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

from tests.formats import writers

BASES = {case.model_type: case for case in reversed(tiny.CASES) if case.experts == "split"}
BASE = BASES["qwen3_moe"]


def save(case: writers.Case, folder: Path, **settings: Any) -> tuple[Path, Path, tiny.Case]:
    """(quantised checkpoint, its plain twin, the model)"""
    sizes = {
        "hidden_size": case.hidden,
        "moe_intermediate_size": case.inner,
        "head_dim": 64 if case.inner == 128 else 48,
        "num_hidden_layers": 2,
    }
    if case.family == "gpt_oss":
        sizes["intermediate_size"] = sizes.pop("moe_intermediate_size")
    base = BASES[case.family]
    model = dataclasses.replace(
        base, settings=base.settings | sizes | settings, experts="fused" if case.fused else "split", extra_tensors={}
    )
    plain = tiny.save(model, folder / "plain")
    writers.quantize(plain, folder / "quantized", case)
    return folder / "quantized", plain, model


@pytest.mark.parametrize("case", writers.CASES, ids=lambda case: case.name)
def test_the_logits_of_the_twin(case: writers.Case, tmp_path: Path) -> None:
    quantized, plain, model = save(case, tmp_path)
    prompt = tiny.prompt(model)
    found = SingleSequence(load_model(quantized, dtype="float32"), 64).forward(prompt)
    expected = tiny.Judge(plain, model.model_type).logits(prompt)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("query_rank", [128, None])
def test_latent_attention_of_fp8_blocks(query_rank: int | None, tmp_path: Path) -> None:
    """As DeepSeek-V3 is published: a projection of 4.5 blocks, and blocks that two heads of the expansion share, which
    is dequantised because queries and results are multiplied by it head by head."""
    base = next(case for case in tiny.CASES if case.name == "deepseek_v3_published")
    sizes = {"hidden_size": 160, "moe_intermediate_size": 96, "q_lora_rank": query_rank, "kv_lora_rank": 136}
    heads = {"qk_nope_head_dim": 56, "qk_rope_head_dim": 8, "v_head_dim": 40, "num_hidden_layers": 2}
    model = dataclasses.replace(base, settings=base.settings | sizes | heads, extra_tensors={})
    plain, quantized = tiny.save(model, tmp_path / "plain"), tmp_path / "quantized"
    writers.quantize(plain, quantized, writers.CASES[0])
    prompt, ours = tiny.prompt(model), load_model(quantized, dtype="float32")
    found = SingleSequence(ours, 64).forward(prompt)
    torch.testing.assert_close(found, tiny.Judge(plain, model.model_type).logits(prompt), rtol=0, atol=1e-4)
    assert ours.layers[0].mixer.kv_b_proj.weight.format is formats.PLAIN  # type: ignore[attr-defined]


SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "minimax_m2": {
        "num_hidden_layers": 3,
        "intermediate_size": 704,
        "rope_parameters": tiny.rope(5e6, partial_rotary_factor=1 / 6),
    },
    "deepseek_v2": {"kv_lora_rank": 136, "qk_nope_head_dim": 56, "qk_rope_head_dim": 8, "v_head_dim": 40},
    "glm4_moe_lite": {
        "q_lora_rank": 128,
        "kv_lora_rank": 136,
        "qk_nope_head_dim": 56,
        "qk_rope_head_dim": 8,
        "v_head_dim": 40,
    },
}


@pytest.mark.parametrize("family", SIZES)
def test_fp8_blocks_of_families(family: str, tmp_path: Path) -> None:
    """In whole blocks and others."""
    case = dataclasses.replace(writers.CASES[0], family=family)
    quantized, plain, model = save(case, tmp_path, **{"intermediate_size": 96, **SIZES[family]})
    prompt = tiny.prompt(model)
    found = SingleSequence(load_model(quantized, dtype="float32"), 64).forward(prompt)
    torch.testing.assert_close(found, tiny.Judge(plain, family).logits(prompt), rtol=0, atol=1e-4)


ERNIE = [("fp8 blocks", 16), ("fp8 blocks", 48), ("ct fp8 channel", 32), ("ct int4 32", 32), ("gptq asymmetric", 32)]


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize(("format", "head_dim"), ERNIE)
def test_reordered_heads(
    format: str, head_dim: int, dense: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of queries and keys move after loading, and their scales with them: in blocks of whole heads none, in other
    blocks each gets its own. The same where there is no memory for dense weights."""
    case = dataclasses.replace(next(case for case in writers.CASES if case.name == format), family="ernie4_5_moe")
    quantized, plain, model = save(case, tmp_path, head_dim=head_dim, intermediate_size=96)
    if not dense:
        monkeypatch.setattr(platforms.current(), "memory", lambda: platforms.Memory(free=0, total=0))
    prompt, ours = tiny.prompt(model), load_model(quantized, dtype="float32")
    assert (ours.layers[0].mixer.qkv_proj.weight.format is formats.PLAIN) == dense  # type: ignore[attr-defined]
    found = SingleSequence(ours, 64).forward(prompt)
    torch.testing.assert_close(found, tiny.Judge(plain, model.model_type).logits(prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["fp8 blocks", "ct int4 64 asymmetric", "mxfp4 gpt-oss"])
def test_what_does_not_fit_is_dequantised_in_every_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a warning says so."""
    quantized, plain, model = save(next(case for case in writers.CASES if case.name == name), tmp_path)
    monkeypatch.setattr(platforms.current(), "memory", lambda: platforms.Memory(free=0, total=0))
    ours, prompt = load_model(quantized, dtype="float32"), tiny.prompt(model)
    assert "GB of dequantised weights do not fit in memory: they are dequantised in every step" in caplog.text
    assert ours.layers[0].mlp.experts.down_EDI.format is not formats.PLAIN
    found = SingleSequence(ours, 64).forward(prompt)
    torch.testing.assert_close(found, tiny.Judge(plain, model.model_type).logits(prompt), rtol=0, atol=1e-4)


def test_weights_stay_packed_where_dense_ones_leave_no_room_for_a_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be refused after they have been read, though the packed ones fit."""
    quantized, _, _ = save(next(case for case in writers.CASES if case.name == "fp8 blocks"), tmp_path)
    sizes: list[int] = []
    load_model(quantized, dtype="float32", check=sizes.append)
    packed, dense = sizes
    assert packed < dense / 2

    def most(limit: int) -> Callable[[int], None]:
        def check(num_bytes: int) -> None:
            if num_bytes > limit:
                raise ValueError("the model does not fit")

        return check

    for limit, fits in ((dense, True), (dense - 1, False)):
        caplog.clear()
        model = load_model(quantized, dtype="float32", check=most(limit))
        assert ("dequantised in every step" not in caplog.text) == fits
        assert (model.layers[0].mlp.experts.down_EDI.format is formats.PLAIN) == fits
        assert (sum(parameter.nbytes for parameter in model.parameters()) == dense) == fits
    with pytest.raises(ValueError, match="does not fit"):
        load_model(quantized, dtype="float32", check=most(packed - 1))


def test_the_formats_that_weights_take(tmp_path: Path) -> None:
    """Gate and up rows of 704 share a scale in blocks of 64, so that up rows begin at a block."""
    case = next(case for case in writers.CASES if case.name == "fp8 blocks, 704")
    quantized, _, _ = save(case, tmp_path)
    config = read_config(quantized)
    decoder = build(config, torch.float32)
    names.match(decoder, read_checkpoint(quantized, quantized=True))
    found = {name: module.format.name for name, module in decoder.named_modules() if isinstance(module, Weight)}
    assert config.quantization == "fp8"
    assert found["layers.0.mlp.experts.gate_up_EFD"] == "fp8_64x128"
    assert found["layers.0.mlp.experts.down_EDI"] == "fp8_128x128"
    assert found["layers.0.mlp.router.weight"] == found["embed_tokens.weight"] == "plain"


READ_BY_TRANSFORMERS = (
    "fp8 blocks",
    "fp8 blocks, bf16 scales",
    "fp8 ue8m0",
    "fp8 ue8m0 bytes",
    "fp8 tensor, scale_inv",
)


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_blocks_as_they_are(name: str, tmp_path: Path) -> None:
    """With whole blocks: it takes the size of a block from the grid, and 192 rows in a grid of 2 for blocks of 96."""
    case = next(case for case in writers.CASES if case.name == name)
    quantized, _, model = save(dataclasses.replace(case, hidden=256, inner=128), tmp_path)
    prompt = tiny.prompt(model)
    found = SingleSequence(load_model(quantized, dtype="float32"), 64).forward(prompt)
    torch.testing.assert_close(found, tiny.Judge(quantized, model.model_type).logits(prompt), rtol=0, atol=1e-4)


def test_gpt_oss_experts_are_what_transformers_unpacks(tmp_path: Path) -> None:
    """Its gate and up rows alternate."""
    case = next(case for case in writers.CASES if case.name == "mxfp4 gpt-oss")
    quantized, _, _ = save(case, tmp_path)
    decoder = build(read_config(quantized), torch.float32)
    experts = decoder.layers[0].mlp.experts
    copies = names.match(decoder, read_checkpoint(quantized, quantized=True))
    decoder.to_empty(device="cpu")
    read_weights(dict(decoder.named_parameters()), copies, platforms.current())
    stored = load_file(next(quantized.glob("*.safetensors")))

    def unpacked(name: str) -> torch.Tensor:
        tensors = (stored[f"model.layers.0.mlp.experts.{name}_{end}"] for end in ("blocks", "scales"))
        return convert_moe_packed_tensors(*tensors, dtype=torch.float32).transpose(1, 2)

    gate_up = unpacked("gate_up_proj")
    assert experts.gate_up_EFD.format.name == "fp4_1x32_e8m0"
    assert torch.equal(experts.gate_up_EFD.dense(), torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1))
    assert torch.equal(experts.down_EDI.dense(), unpacked("down_proj"))


def test_awq_is_what_its_converter_unpacks() -> None:
    weight = torch.randn(64, 96)
    tensors, _ = writers.awq(32)(weight)
    q, _, zero = writers.integers(weight, 32, False)
    for packed, values in ((tensors["qweight"].contiguous(), q), (tensors["qzeros"].contiguous(), zero)):
        unpacked, _ = AutoAWQConverter.unpack_awq(packed, packed, 4)
        unpacked, _ = AutoAWQConverter.reverse_awq_order(unpacked, unpacked, 4)
        assert torch.equal(unpacked.T.float() % 16, values)


GPTQ = pytest.mark.parametrize(("symmetric", "version"), [(True, 1), (False, 1), (True, 2), (False, 2)])


def gptq_layer() -> torch.Tensor:
    """Also with groups whose numbers all have one sign, so that zero points are 0 and 15."""
    weight = torch.randn(64, 96)
    weight[::3] = weight[::3].abs()
    weight[1::3] = -weight[1::3].abs()
    return weight


@GPTQ
def test_gptq_is_what_its_layout_says(symmetric: bool, version: int) -> None:
    """Number by number: input i of output o is in word [i / 8, o], a zero point in word [group, o / 8], and format 1
    subtracts 1 from each of these by one subtraction."""
    tensors, twin = writers.gptq(32, symmetric, version)(gptq_layer())
    words, zeros = (tensors[name].tolist() for name in ("qweight", "qzeros"))
    scales, groups = tensors["scales"].float().tolist(), tensors["g_idx"].tolist()
    offset = 0x11111111 if version == 1 else 0
    for o in range(64):
        for i, group in enumerate(groups):
            q = words[i // 8][o] >> 4 * (i % 8) & 15
            zero = zeros[group][o // 8] + offset >> 4 * (o % 8) & 15
            assert (q - zero) * scales[group][o] == pytest.approx(twin[o, i].item(), abs=1e-6), (o, i)
    (source,) = gptq.sources(
        {"bits": 4, "group_size": 32, "sym": symmetric, "format": "gptq" if version == 1 else "gptq_v2"}
    )
    format = source.format((), {"scale": "float16"})
    ends = source.names("x.weight")
    ours = {name: source.convert(name, tensors[end.removeprefix("x.")], (64, 96), format) for name, end in ends.items()}
    torch.testing.assert_close(format.dequantize(ours, (64, 96), torch.float32), twin, rtol=0, atol=1e-6)


@GPTQ
def test_gptq_is_what_gptqmodel_writes_and_reads(symmetric: bool, version: int) -> None:
    """The same tensors from the same numbers, and the same numbers from these."""
    reader = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    convert = pytest.importorskip("gptqmodel.utils.model")
    weight = gptq_layer()
    tensors, twin = writers.gptq(32, symmetric, version)(weight)
    _, scale, zero = writers.integers(weight, 32, symmetric)
    layer = reader.TorchLinear(
        bits=4, group_size=32, sym=symmetric, desc_act=False, in_features=96, out_features=64
    ).eval()
    plain = torch.nn.Linear(96, 64, bias=False)
    plain.weight.data = twin
    layer.pack(plain, scale.float(), zero, tensors["g_idx"])
    if version == 1:
        config = SimpleNamespace(bits=4, pack_dtype=torch.int32)
        convert.convert_gptq_v2_to_v1_format_module(layer, config)
    assert all(torch.equal(getattr(layer, name), tensor) for name, tensor in tensors.items())
    if version == 1:
        convert.convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    assert torch.equal(layer.dequantize_weight().T, twin.half())


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_quantised_while_loading(quantization: str, tmp_path: Path) -> None:
    """The same as loading a checkpoint that was quantised before."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 2}
    model = dataclasses.replace(BASE, settings=BASE.settings | sizes)
    plain, prompt = tiny.save(model, tmp_path / "plain"), tiny.prompt(model)
    found = SingleSequence(load_model(plain, dtype="float32", quantization=quantization), 64).forward(prompt)
    format = rounded.Rounded(rounded.FORMATS[quantization]).format((), {"data": "float32"})
    for file in plain.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if not any(part in name for part in writers.PLAIN):
                tensors[name] = format.dequantize(format.quantize(tensor), tuple(tensor.shape), torch.float32)
        save_file(tensors, file)
    torch.testing.assert_close(found, tiny.Judge(plain, model.model_type).logits(prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_transposed_experts_quantised_while_loading(quantization: str, tmp_path: Path) -> None:
    """Gate rows and up rows alternate, so no two of them share a scale."""
    base = BASES["gpt_oss"]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    plain = tiny.save(dataclasses.replace(base, settings=base.settings | sizes), tmp_path)
    experts = load_model(plain, dtype="float32", quantization=quantization).layers[0].mlp.experts
    stored = load_file(plain / "model.safetensors")
    format = rounded.Rounded(rounded.FORMATS[quantization]).format((1,), {"data": "float32"})
    gate_up, down = (stored[f"model.layers.0.mlp.experts.{name}_proj"].mT for name in ("gate_up", "down"))
    rows = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
    assert torch.equal(
        experts.gate_up_EFD.dense(), format.dequantize(format.quantize(rows), tuple(rows.shape), torch.float32)
    )
    assert (experts.down_EDI.dense() - down).abs().max() < 0.1 * down.abs().max()
    with pytest.raises(ValueError, match="in MXFP4 alone"):
        quantize(plain, tmp_path / "new", quantization, platforms.current())


def remove(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


DAMAGES: list[tuple[str, str, Callable[[dict[str, torch.Tensor], str], None], str]] = [
    ("fp8 blocks", "weight_scale_inv", remove, "_scale_inv' is missing"),
    ("fp8 blocks", "weight_scale_inv", lambda t, n: t.update({n: t[n][:1].clone()}), "_scale_inv' has shape"),
    ("fp8 blocks", "weight_scale_inv", lambda t, n: t.update({n: t[n] * torch.nan}), "not a finite number"),
    ("fp8 blocks", "weight_scale_inv", lambda t, n: t.update({n: t[n].int()}), "is I32, where floating-point"),
    ("fp8 blocks", "weight", lambda t, n: t.update({n: t[n].view(torch.uint8)}), "is U8, where float8_e4m3fn"),
    ("fp8 ue8m0 bytes", "weight_scale_inv", lambda t, n: t[n].view(torch.uint8).fill_(255), "not a finite number"),
    ("fp8 blocks fused", "down_proj_scale_inv", remove, "down_proj_scale_inv' is missing"),
    ("fp8 blocks fused", "down_proj_scale_inv", lambda t, n: t.update({n: t[n][1:].clone()}), "_inv' has shape"),
    ("fp8 blocks fused", "down_proj_scale_inv", lambda t, n: t[n][3].fill_(torch.inf), "not a finite number"),
    ("mxfp4 fused", "down_proj_scales", remove, "down_proj_scales' is missing"),
    ("mxfp4 fused", "down_proj_scales", lambda t, n: t[n][2].fill_(255), "down_proj_scales' has a scale that is not"),
    ("mxfp4 fused", "down_proj_blocks", lambda t, n: t.update({n: t[n].flatten(2)}), "down_proj_blocks' has shape"),
    ("ct int4 32", "weight_scale", lambda t, n: t[n].fill_(torch.nan), "weight_scale' has a scale that is not"),
    ("gptq", "qweight", lambda t, n: t.update({n: t[n].T.contiguous()}), "qweight' has shape"),
    ("awq", "qweight", lambda t, n: t.update({n: t[n].view(torch.uint8)}), "is U8, where int32 should be"),
    ("gptq", "g_idx", lambda t, n: t.update({n: t[n].flip(0).contiguous()}), "g_idx' has inputs in the order of act"),
    ("ct int4 32", "weight_packed", lambda t, n: t.update({n: t[n][:, :-1].clone()}), "weight_packed' has shape"),
    ("ct int4 32", "weight_packed", lambda t, n: t.update({n: t[n].long()}), "is I64, where int32 should be"),
    ("ct int4 32", "weight_scale", remove, "weight_scale' is missing"),
    ("gptq asymmetric", "qzeros", lambda t, n: t.update({n: t[n][:-1].clone()}), "qzeros' has shape"),
    ("awq", "scales", lambda t, n: t.update({n: t[n].T.contiguous()}), "scales' has shape"),
    ("ct mxfp4", "weight_scale", lambda t, n: t.update({n: t[n][:, :-1].clone()}), "weight_scale' has shape"),
]


@pytest.mark.parametrize(("format", "tensor", "damage", "message"), DAMAGES, ids=[f"{d[0]}-{d[3]}" for d in DAMAGES])
def test_damage_is_refused_by_name(
    format: str, tensor: str, damage: Callable[[dict[str, torch.Tensor], str], None], message: str, tmp_path: Path
) -> None:
    case = next(case for case in writers.CASES if case.name == format)
    quantized, _, _ = save(case, tmp_path)
    file = next(quantized.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith((f"down_proj.{tensor}", f"experts.{tensor}")))
    damage(tensors, name)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(quantized, dtype="float32")
    assert str(caught.value).startswith(f"{file}: tensor {name!r} ")


@pytest.mark.parametrize(("group", "indices"), [(32, "absent"), (32, "empty"), (-1, "whole")])
def test_groups_in_order_need_no_indices(group: int, indices: str, tmp_path: Path) -> None:
    """With a group of all inputs, all are in group 0."""
    config = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True}
    pack = writers.gptq(32, True, 1) if group > 0 else lambda weight: writers.gptq(weight.shape[1], True, 1)(weight)
    quantized, plain, model = save(writers.Case("gptq", config, pack), tmp_path)
    file = next(quantized.glob("*.safetensors"))
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".g_idx")]:
        if indices == "absent":
            del tensors[name]
        elif indices == "empty":
            tensors[name] = tensors[name][:0].clone()
    save_file(tensors, file)
    prompt = tiny.prompt(model)
    found = SingleSequence(load_model(quantized, dtype="float32"), 64).forward(prompt)
    torch.testing.assert_close(found, tiny.Judge(plain, model.model_type).logits(prompt), rtol=0, atol=1e-4)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    quantized, _, _ = save(writers.CASES[0], tmp_path)
    file = next(quantized.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="truncated, expected .*; tensor '.*' is the first to be cut off"):
        load_model(quantized, dtype="float32")


def test_what_headers_show_is_refused_before_memory_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, _, _ = save(writers.CASES[0], tmp_path)
    file = next(quantized.glob("*.safetensors"))
    tensors = load_file(file)
    remove(tensors, next(name for name in tensors if name.endswith("weight_scale_inv")))
    save_file(tensors, file)
    monkeypatch.setattr(Decoder, "_apply", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(CheckpointError, match="_scale_inv' is missing"):
        load_model(quantized, dtype="float32")


INT4_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"g": {"targets": ["Linear"], "weights": INT4_WEIGHTS}},
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
REFUSED = [
    ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
    ({"quant_method": "gptq", "bits": 8}, "bits 8 of GPTQ"),
    ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' of AWQ"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size 128"),
    ({"quant_method": "compressed-tensors"}, "without config_groups"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}}},
        },
        "config_groups.g: format 'nvfp4-pack-quantized'",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt' (NVFP4) is not supported"),
    ([], "must be an object"),
    (INT4 | {"transform_config": {"config_groups": {"R4": {"type": "hadamard"}}}}, "transform_config is not supported"),
    (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config {'format': 'sparse-24-bitmask'}"),
    (INT4 | {"moe_sparsity_config": {"method": "prune", "num_experts": [4]}}, "moe_sparsity_config is not supported"),
    (INT4 | {"config_groups": {"g": {"weights": INT4_WEIGHTS, "rotated": True}}}, "config_groups.g: rotated is not"),
    (INT4 | {"config_groups": {"g": {"weights": INT4_WEIGHTS | {"codebook": "nf4"}}}}, "config_groups.g: codebook is"),
    (INT4 | {"config_groups": {"g": {"weights": INT4_WEIGHTS | {"actorder": "dynamic"}}}}, "actorder 'dynamic'"),
    (GPTQ | {"rotation": "hadamard"}, "rotation is not supported"),
    (GPTQ | {"lm_head": True}, "lm_head is not supported"),
    (GPTQ | {"dynamic": {"+:.*down_proj": {"sym": False}}}, "dynamic: another sym for '+:.*down_proj'"),
    (GPTQ | {"format": "bitblas"}, "checkpoint_format 'bitblas'"),
    (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq'"),
    (AWQ | {"format": "gemv_fast"}, "format 'gemv_fast' of AWQ"),
    (writers.FP8 | {"weight_permutation": [1, 0]}, "weight_permutation is not supported"),
    ({"quant_method": "mxfp4", "rotation": "hadamard"}, "rotation is not supported"),
]


@pytest.fixture(scope="module")
def plain_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tiny.save(BASE, tmp_path_factory.mktemp("plain")) / "config.json").read_text())
    return found


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], message: str, plain_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(plain_config | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_config(tmp_path)


ARGS = INT4_WEIGHTS | {"actorder": "static", "block_structure": None, "dynamic": False, "observer": "minmax"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llm-compressor": INT4
    | {
        "config_groups": {
            "group_0": {
                "format": "pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": ARGS | {"observer_kwargs": {}, "scale_dtype": None, "symmetric": True, "zp_dtype": None},
            }
        },
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {"config_groups": {}},
        "version": "0.14.1.dev11",
    },
    "llm-compressor, older": INT4
    | {
        "sparsity_config": {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"},
        "quantization_status": "frozen",
    },
    "GPTQModel": GPTQ
    | {
        "checkpoint_format": "gptq",
        "desc_act": False,
        "dynamic": {"-:.*attn.*": {}, "lm_head": {}},
        "hyb_act": False,
        "lm_head": False,
        "meta": {"quantizer": ["gptqmodel:5.7.0"], "damp_percent": 0.05, "act_group_aware": True},
        "method": "gptq",
        "pack_dtype": "int32",
        "sym": True,
    },
    "AutoGPTQ": GPTQ
    | {"damp_percent": 0.1, "desc_act": False, "is_marlin_format": False, "model_file_base_name": "model"}
    | {"model_name_or_path": None, "static_groups": False, "sym": True, "true_sequential": True},
    "AutoRound": GPTQ
    | {"autoround_version": "0.12.3", "data_type": "int", "iters": 200, "low_gpu_mem_usage": True, "seqlen": 2048}
    | {"provider": "auto-round", "sym": True, "block_name_to_quantize": ["model.layers"], "super_bits": None},
    "AutoAWQ": AWQ
    | {"backend": "autoawq", "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None, "lm_head": False}
    | {"modules_to_fuse": None, "modules_to_not_convert": ["gate"], "version": "gemm", "zero_point": True},
    "DeepSeek": writers.FP8 | {"scale_fmt": "ue8m0"},
    "MiniMax": writers.FP8
    | {"fmt": "float8_e4m3fn", "ignored_layers": ["lm_head"], "modules_to_not_convert": ["gate"]},
    "one scale": {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None},
    "gpt-oss": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "transformers, gptq": transformers.GPTQConfig(bits=4, dataset="c4").to_dict(),
    "transformers, awq": transformers.AwqConfig(bits=4).to_dict(),
    "transformers, fp8": transformers.FineGrainedFP8Config().to_dict(),
    "transformers, mxfp4": transformers.Mxfp4Config().to_dict(),
}


@pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
def test_what_published_checkpoints_say_beside_is_passed_over(config: dict[str, Any]) -> None:
    assert formats.sources_of(json.loads(json.dumps(config, default=str)))


def test_a_group_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    case = next(case for case in writers.CASES if case.name == "ct int4 32")
    quantized, _, _ = save(case, tmp_path)
    raw = json.loads((quantized / "config.json").read_text())
    raw["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 128
    (quantized / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"tensor '.*_packed': 160 inputs are no multiple of the group size 128"):
        load_model(quantized, dtype="float32")


@pytest.mark.parametrize("name", ["fp8_128x128", "int8_1x0", "int4_1x128_bf16", "int4_1x32_f16_zero", "fp4_1x32_e8m0"])
def test_names_of_formats_are_read_back(name: str) -> None:
    assert formats.named(name).name == name


@pytest.mark.parametrize(
    "format",
    [
        Grouped("fp8", 128, 128),
        Grouped("int8"),
        Grouped("int4", 1, 32),
        Grouped("int4", 1, 32, zero=True),
        Grouped("fp4", 1, 32, "uint8"),
    ],
)
@pytest.mark.parametrize("shape", [(96, 64), (3, 160, 288)])
def test_rounding_stays_close(format: Grouped, shape: tuple[int, ...]) -> None:
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = format.quantize(dense)
    specs = format.tensors(shape)
    assert {name: (tuple(t.shape), str(t.dtype)[6:]) for name, t in made.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()
    }
    error = (format.dequantize(made, shape, torch.float32) - dense).abs().max()
    # Half the largest distance of two numbers; with fp4, what is above the largest.
    scale = torch.exp2(made["scale"].float() - 127) if format.scale == "uint8" else made["scale"]
    assert 0 < error <= {"fp8": 16, "int8": 0.5, "int4": 0.5, "fp4": 2}[format.numbers] * scale.max() * 1.001


@pytest.mark.parametrize("experts", ["split", "fused"])
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_what_quantize_writes_is_read_by_transformers(
    quantization: str, experts: Literal["split", "fused"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64, "num_key_value_heads": 2}
    model = dataclasses.replace(BASE, settings=BASE.settings | sizes, experts=experts, sharded=experts == "split")
    plain, out, prompt = tiny.save(model, tmp_path / "plain"), tmp_path / "out", tiny.prompt(model)
    assert main(["quantize", str(plain), str(out), "--quantization", quantization]) == 0
    assert "GB of weights in" in capsys.readouterr().out
    found = SingleSequence(load_model(out, dtype="float32"), 64).forward(prompt)
    expected = tiny.Judge(out, model.model_type).logits(prompt)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    loaded = SingleSequence(load_model(plain, dtype="float32", quantization=quantization), 64).forward(prompt)
    torch.testing.assert_close(found, loaded, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="is not empty"):
        quantize(plain, out, quantization, platforms.current())
    with pytest.raises(ValueError, match="is quantised already"):
        quantize(out, tmp_path / "again", quantization, platforms.current())


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("family", ["ernie4_5_moe", "glm4_moe_lite"])
def test_what_quantize_writes_of_other_families(
    family: str, quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """ERNIE's head is the embedding, and its rows are reordered in memory alone. The output of GLM's attention has 2.5
    blocks of inputs, which transformers does not read."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    base, heads = BASES[family], {"head_dim": 64} if family == "ernie4_5_moe" else {}
    model = dataclasses.replace(base, settings=base.settings | sizes | heads, extra_tensors={})
    plain, out, prompt = tiny.save(model, tmp_path / "plain"), tmp_path / "out", tiny.prompt(model)
    assert main(["quantize", str(plain), str(out), "--quantization", quantization]) == 0
    kept = "2 tensors stay plain: no whole blocks, which transformers does not read (first: model.layers.0.self_attn.o_"
    assert (kept in capsys.readouterr().out) == ((family, quantization) == ("glm4_moe_lite", "fp8"))
    found = SingleSequence(load_model(out, dtype="float32"), 64).forward(prompt)
    torch.testing.assert_close(found, tiny.Judge(out, family).logits(prompt), rtol=0, atol=1e-4)
    if family == "ernie4_5_moe":
        loaded = SingleSequence(load_model(plain, dtype="float32", quantization=quantization), 64).forward(prompt)
        torch.testing.assert_close(found, loaded, rtol=0, atol=1e-5)
