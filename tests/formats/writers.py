"""Quantised checkpoints and their dequantised twins, for every format that is read.

compressed-tensors writes and reads its own formats; AWQ is held against its converter, GPTQ against GPTQModel. Knows
nothing of anabranch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""From a weight [N, K] to (its tensors, without the layer's name; the numbers that they stand for)."""
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "bias", "shared_expert_gate", "router", "moe_statics")
"""Parts of the names of tensors that no writer quantises."""


@dataclass(frozen=True)
class Case:
    name: str
    config: dict[str, Any]
    """`quantization_config`."""
    pack: Pack
    hidden: int = 160
    inner: int = 96
    skipped: tuple[str, ...] = field(default=())
    """Parts of the names of further weights that stay plain."""
    fused: bool = False
    """All experts of a layer are in one tensor."""
    packs: tuple[tuple[str, Pack], ...] = ()
    """Of weights with this part in their names, instead of `pack`."""
    family: str = "qwen3_moe"
    """gpt_oss: plain experts are [inputs, outputs], and become [outputs, inputs]."""


def blocks(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The largest magnitude of each block, where the last ones may be smaller."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -k % columns, 0, -n % rows))
    return padded.reshape(-(-n // rows), rows, -(-k // columns), columns).amax((1, 3))


def spread(scale: torch.Tensor, weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]


def fp8_block(scale_dtype: torch.dtype) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = (blocks(weight, 128, 128) / 448).to(scale_dtype)
        whole = spread(scale.float(), weight, 128, 128)
        q = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": q, "weight_scale_inv": scale}, q.float() * whole

    return pack


def fp8_ue8m0(scale_dtype: torch.dtype) -> Pack:
    """Scales that are powers of two."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = torch.exp2(torch.ceil(torch.log2(blocks(weight, 128, 128) / 448)))
        whole = spread(scale, weight, 128, 128)
        q = (weight / whole).to(torch.float8_e4m3fn)
        return {"weight": q, "weight_scale_inv": scale.to(scale_dtype)}, q.float() * whole

    return pack


def fp8_tensor(suffix: str) -> Pack:
    """One scale for a matrix, and one for its inputs, as checkpoints with static activations have them."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().max() / 448
        q = (weight / scale).to(torch.float8_e4m3fn)
        inputs = "activation_scale" if suffix == "_scale_inv" else "input_scale"
        return {"weight": q, f"weight{suffix}": scale, inputs: torch.tensor(0.01)}, q.float() * scale

    return pack


def mxfp4_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """As gpt-oss keeps them; transformers says what they stand for."""
    grouped = weight.unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(grouped.abs().amax(2))) - 2
    levels = torch.tensor(FP4_VALUES)
    q = (grouped / torch.exp2(exponent)[..., None])[..., None] - levels
    code = q.abs().argmin(-1).to(torch.uint8)
    packed, scale = code[..., ::2] | (code[..., 1::2] << 4), (exponent + 127).to(torch.uint8)
    twin = convert_moe_packed_tensors(packed[None], scale[None], dtype=torch.float32)[0].T
    return {"weight_blocks": packed, "weight_scales": scale}, twin


def compressed(format: str, **args: Any) -> tuple[dict[str, Any], Pack]:
    """(`quantization_config`, pack) of compressed-tensors' own writer and reader."""
    weights = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        match weights.strategy:
            case "tensor":
                low, high = weight.min().reshape(1), weight.max().reshape(1)
            case "channel":
                low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
            case "block":
                high = blocks(weight, *weights.block_structure)
                low = -high
            case _:
                grouped = weight.unflatten(1, (-1, weights.group_size))
                low, high = grouped.amin(2), grouped.amax(2)
        scale, zero = calculate_qparams(low, high, weights)
        state = {"weight": weight, "weight_scale": scale}
        if not weights.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
        packed = compressor.compress(state, scheme)
        twin = compressor.decompress(packed, scheme)["weight"]
        return {name: tensor.contiguous() for name, tensor in packed.items()}, twin.float()

    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.model_dump(mode="json")}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }
    return config, pack


def static(made: tuple[dict[str, Any], Pack]) -> tuple[dict[str, Any], Pack]:
    """With scales of inputs that were found before."""
    config, pack = made
    inputs = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False).model_dump(mode="json")
    groups = {name: group | {"input_activations": inputs} for name, group in config["config_groups"].items()}

    def with_scale(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, twin = pack(weight)
        return tensors | {"input_scale": torch.tensor([0.01])}, twin

    return config | {"config_groups": groups}, with_scale


def mixed(
    attention: tuple[dict[str, Any], Pack], others: tuple[dict[str, Any], Pack]
) -> tuple[dict[str, Any], Pack, tuple[tuple[str, Pack], ...]]:
    """Two groups, each with a format of its own."""
    groups = {
        f"group_{i}": config["config_groups"]["group_0"] | {"format": config["format"], "targets": [target]}
        for i, (target, (config, _)) in enumerate((("re:.*self_attn.*", attention), ("re:.*mlp.*", others)))
    }
    config = attention[0] | {"format": "mixed-precision", "config_groups": groups}
    return config, others[1], (("self_attn", attention[1]),)


def nibbles(values: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers along `dim` in an int32: number i of the eight goes to place order[i]."""
    values = values.to(torch.int64).unflatten(dim, (-1, 8)).movedim(dim + 1, -1)
    packed = sum(values[..., i] << 4 * place for i, place in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def integers(weight: torch.Tensor, group: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(q [N, K] of 0 to 15, scale fp16 [N, K / g], zero [N, K / g])"""
    grouped = weight.unflatten(1, (-1, group))
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    scale = ((torch.maximum(high, -low) / 7 if symmetric else (high - low) / 15) + 1e-6).half()
    zero = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(0, 15)
    q = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    return q.flatten(1), scale, zero


def twin_of(q: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, group: int) -> torch.Tensor:
    return ((q.unflatten(1, (-1, group)) - zero[..., None]) * scale.float()[..., None]).flatten(1)


def gptq(group: int, symmetric: bool, version: int) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        q, scale, zero = integers(weight, group, symmetric)
        tensors = {
            "qweight": nibbles(q.T, 0),
            "qzeros": nibbles(zero.T, 1) - (0x11111111 if version == 1 else 0),  # a zero of 0 borrows from the next
            "scales": scale.T.contiguous(),
            "g_idx": (torch.arange(weight.shape[1]) // group).int(),
        }
        return tensors, twin_of(q, scale, zero, group)

    return pack


AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in an int32 of AWQ that output i of the eight has: columns 0 2 4 6 1 3 5 7 follow each other."""


def awq(group: int) -> Pack:
    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        q, scale, zero = integers(weight, group, False)
        tensors = {
            "qweight": nibbles(q.T, 1, AWQ_PLACES),
            "qzeros": nibbles(zero.T, 1, AWQ_PLACES),
            "scales": scale.T.contiguous(),
        }
        return tensors, twin_of(q, scale, zero, group)

    return pack


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group"}
CT_FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
CT_INT4 = compressed("pack-quantized", **INT4, group_size=32)
MIXED, MIXED_PACK, MIXED_PACKS = mixed(CT_FP8, CT_INT4)
FP8_TENSOR = FP8 | {"activation_scheme": "static", "weight_block_size": None}
CASES = [
    Case("fp8 blocks", FP8, fp8_block(torch.float32)),
    Case("fp8 blocks, bf16 scales", FP8, fp8_block(torch.bfloat16)),
    Case("fp8 blocks, 704", FP8, fp8_block(torch.float32), inner=704),
    Case("fp8 blocks, attention plain", FP8, fp8_block(torch.float32), skipped=("self_attn", "layers.1.")),
    Case("fp8 ue8m0", FP8 | {"scale_fmt": "ue8m0"}, fp8_ue8m0(torch.float32)),
    Case("fp8 ue8m0 bytes", FP8 | {"scale_fmt": "ue8m0"}, fp8_ue8m0(torch.float8_e8m0fnu)),
    Case("fp8 ue8m0 bytes, 704", FP8 | {"scale_fmt": "ue8m0"}, fp8_ue8m0(torch.float8_e8m0fnu), inner=704),
    Case("fp8 blocks fused", FP8, fp8_block(torch.float32), fused=True),
    Case("fp8 blocks fused, 704", FP8, fp8_block(torch.bfloat16), inner=704, fused=True),
    Case("mxfp4 fused", {"quant_method": "mxfp4"}, mxfp4_blocks, skipped=("self_attn",), fused=True),
    Case("mxfp4 gpt-oss", {"quant_method": "mxfp4"}, mxfp4_blocks, skipped=("self_attn",), family="gpt_oss"),
    Case("fp8 tensor", FP8_TENSOR, fp8_tensor("_scale")),
    Case("fp8 tensor, scale_inv", FP8_TENSOR, fp8_tensor("_scale_inv")),
    Case("ct fp8 channel", *CT_FP8),
    Case("ct fp8 tensor", *compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
    Case("ct fp8 static", *static(compressed("float-quantized", num_bits=8, type="float", strategy="tensor"))),
    Case("ct two groups", MIXED, MIXED_PACK, packs=MIXED_PACKS),
    Case(
        "ct fp8 block",
        *compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        hidden=256,
        inner=128,
    ),
    Case("ct int8 channel", *compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    Case("ct int4 32", *CT_INT4),
    Case("ct int4 channel", *compressed("pack-quantized", num_bits=4, type="int", strategy="channel")),
    Case("ct int4 128", *compressed("pack-quantized", **INT4, group_size=128), hidden=256, inner=128),
    Case(
        "ct int4 64 asymmetric",
        *compressed("pack-quantized", **INT4, group_size=64, symmetric=False),
        hidden=192,
        inner=128,
    ),
    Case("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, gptq(32, True, 1)),
    Case(
        "gptq v2 asymmetric",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        gptq(32, False, 2),
    ),
    Case("gptq asymmetric", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, gptq(32, False, 1)),
    Case("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq(32)),
    Case("ct mxfp4", *compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)),
]


def quantize(plain: Path, quantized: Path, case: Case) -> None:
    """Write `quantized`, and replace the weights of the plain checkpoint by what they stand for."""
    shutil.copytree(plain, quantized)
    for file in plain.glob("*.safetensors"):
        twins, packed = {}, {}
        for name, tensor in load_file(file).items():
            if any(part in name for part in (*PLAIN, *case.skipped)):
                packed[name] = twins[name] = tensor
                continue
            tensor = tensor.mT if case.family == "gpt_oss" else tensor
            pack = next((pack for part, pack in case.packs if part in name), case.pack)
            matrices = [pack(matrix) for matrix in (tensor.float() if tensor.dim() == 3 else tensor.float()[None])]
            for end in matrices[0][0]:
                values = [made[end].contiguous() for made, _ in matrices]
                # `experts.down_proj` and `experts.down_proj_scale_inv`; `down_proj.weight`, `down_proj.qweight`
                full = (
                    name + end.removeprefix("weight") if tensor.dim() == 3 else f"{name.removesuffix('.weight')}.{end}"
                )
                packed[full] = torch.stack(values) if tensor.dim() == 3 else values[0]
            twin = torch.stack([twin for _, twin in matrices]).view(tensor.shape).to(tensor.dtype)
            twins[name] = twin.mT.contiguous() if case.family == "gpt_oss" else twin
        save_file(packed, quantized / file.name)
        save_file(twins, file)
    for folder in (plain, quantized):
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": case.config}))
