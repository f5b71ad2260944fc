"""Write a plain checkpoint again with quantised matrices, in layouts that other engines and transformers read.

fp8: blocks of 128 × 128 with `weight_scale_inv`, as DeepSeek and Qwen publish them; int4: compressed-tensors' packed
integers in groups of 128. The matrices of layers are quantised, one tensor at a time; embedding, head, routers, what a
format cannot hold and what is no whole blocks (transformers cannot read those) stay as they are. Experts in one tensor
are written one by one, as published checkpoints have them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from anabranch.formats import Grouped, rounded
from anabranch.formats.grouped import unpack
from anabranch.loader import names
from anabranch.loader.checkpoint import DTYPES, INDEX_FILE, CheckpointError, TensorInfo, read_checkpoint
from anabranch.loader.load import build
from anabranch.loader.read import Progress
from anabranch.models.config import read_config
from anabranch.ops.weight import Weight
from anabranch.platforms import Platform

Tensors = dict[str, torch.Tensor]
CODES = {ours: theirs for theirs, ours in DTYPES.items()}
"""torch's names of dtypes, and those of safetensors."""


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix that is written as a tensor of its own."""

    name: str
    """Of its layer."""
    index: tuple[int | slice, ...] = ()
    """In the tensor that is read."""


def quantize(
    source: Path, target: Path, quantization: str, platform: Platform, progress: Progress | None = None
) -> tuple[int, list[str]]:
    """Write a checkpoint folder; the bytes of its weights, and the matrices of layers that stay plain because they are
    no whole blocks. ValueError where the source cannot be quantised."""
    config, format = read_config(source), rounded.FORMATS[quantization]
    if config.sources:
        raise ValueError(f"{source}: is quantised already; give the original weights")
    checkpoint = read_checkpoint(source)
    model = build(config, torch.float32)
    names.match(model, checkpoint)  # refuses what is missing, surplus or misshapen
    parts = {name: found for name, found in _parts(model, format) if name in checkpoint.tensors}
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise ValueError(f"{target}: is not empty; give a folder that is new or empty")
    for file in source.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt", ".pth") and file.name != INDEX_FILE:
            shutil.copy(file, target)
    done, total, places, written = 0, checkpoint.num_bytes, {}, 0
    for file in checkpoint.files:
        infos = [info for info in checkpoint.tensors.values() if info.file == file]
        with Writer(target / file.name) as writer:
            for info in infos:
                for name, tensor in _written(info, parts.get(info.name), format, platform):
                    writer.add(name, tensor)
                    places[name], written = file.name, written + tensor.nbytes
                done += info.num_bytes
                if progress is not None:
                    progress(done, total)
    if len(checkpoint.files) > 1:
        index = {"metadata": {"total_size": written}, "weight_map": places}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=1))
    raw = json.loads((source / "config.json").read_text())
    plain = [info.name.removesuffix(".weight") for info in checkpoint.tensors.values() if _stays(info, parts)]
    raw["quantization_config"] = written_config(quantization, [*dict.fromkeys((*plain, "lm_head"))])
    (target / "config.json").write_text(json.dumps(raw, indent=2))
    return written, [name for name, found in parts.items() if not found]


def _parts(model: Any, format: Grouped) -> Iterator[tuple[str, list[Part]]]:
    """The checkpoint tensors that can be quantised, and the matrices in each; [] where they are no whole blocks."""
    for path, weight, layouts in names.parameter_layouts(model):
        if not isinstance(weight, Weight) or not names.is_projection(path, weight.full_shape):
            continue
        if not rounded.can_round(format, weight.full_shape):
            continue
        if weight.transposed:
            raise ValueError(
                f"{model.config.model_type}: other engines read its experts in MXFP4 alone, which is not "
                "written here; quantise the plain checkpoint while loading it, with --quantization"
            )
        whole = all(_is_whole(format, shape) for _, shape in names.stored(weight, layouts))
        for layout in layouts:
            for piece in layout:
                if not whole:
                    yield piece.name, []
                elif piece.name.endswith(".weight"):
                    yield piece.name, [Part(piece.name.removesuffix(".weight"))]
                else:
                    yield piece.name, [*_split(piece.name, weight.full_shape)]


def _is_whole(format: Grouped, shape: tuple[int, ...]) -> bool:
    """Whether blocks divide a matrix, or it is smaller than a block."""
    return all(size <= block or size % block == 0 for size, block in zip(shape[-2:], (format.rows, format.group)))


def _split(name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    """The experts of a tensor that holds all of them, with gate rows before up rows."""
    experts, _, last = name.rpartition(".")
    for e in range(shape[0]):
        if last == "gate_up_proj":
            half = shape[1] // 2
            yield Part(f"{experts}.{e}.gate_proj", (e, slice(0, half)))
            yield Part(f"{experts}.{e}.up_proj", (e, slice(half, None)))
        else:
            yield Part(f"{experts}.{e}.{last}", (e,))


def _stays(info: TensorInfo, parts: dict[str, list[Part]]) -> bool:
    return not parts.get(info.name) and len(info.shape) == 2 and info.name.endswith(".weight")


def _written(
    info: TensorInfo, parts: list[Part] | None, format: Grouped, platform: Platform
) -> Iterator[tuple[str, torch.Tensor]]:
    tensor = _read(info)
    if not parts:
        yield info.name, tensor
        return
    format = rounded.Rounded(format).format((), {"data": DTYPES[info.dtype]})
    for part in parts:
        made = format.quantize(tensor[part.index].to(platform.device))
        for end, value in stored_tensors(made, tuple(tensor[part.index].shape), format).items():
            yield f"{part.name}.{end}", value.cpu().contiguous()


def stored_tensors(made: Tensors, shape: tuple[int, ...], format: Grouped) -> Tensors:
    """The format's tensors as public checkpoints keep them."""
    if format.numbers == "fp8":
        return {"weight": made["data"], "weight_scale_inv": made["scale"]}
    eight = unpack(made["data"], format.span(shape[-1])).to(torch.int64).unflatten(-1, (-1, 8))
    packed = (eight << torch.arange(0, 32, 4, device=eight.device)).sum(-1)
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": made["scale"], "weight_shape": torch.tensor(shape)}


def written_config(quantization: str, plain: list[str]) -> dict[str, Any]:
    if quantization == "fp8":
        block = {"fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": plain}
        return {"quant_method": "fp8", "activation_scheme": "dynamic", **block}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
    }


def _read(info: TensorInfo) -> torch.Tensor:
    buffer = bytearray(info.num_bytes)
    with open(info.file, "rb") as file:
        file.seek(info.begin)
        if file.readinto(buffer) != info.num_bytes:
            raise CheckpointError(f"{info.file}: became shorter while it was read; download it again")
    dtype: torch.dtype = getattr(torch, DTYPES[info.dtype])
    return torch.frombuffer(buffer, dtype=dtype).view(info.shape) if buffer else torch.empty(info.shape, dtype=dtype)


class Writer:
    """A safetensors file. Tensors are written as they are added, to a file of their own; at the end the header, whose
    length they decide, is written before them."""

    def __init__(self, path: Path) -> None:
        self.path, self.body = path, path.with_suffix(".part")
        self.header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self.size = 0

    def __enter__(self) -> Writer:
        self.file = open(self.body, "wb")
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        end = self.size + tensor.nbytes
        dtype = CODES[str(tensor.dtype).removeprefix("torch.")]
        self.header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [self.size, end]}
        self.file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self.size = end

    def __exit__(self, failed: object, *_: object) -> None:
        self.file.close()
        if not failed:
            text = json.dumps(self.header).encode()
            text += b" " * (-len(text) % 8)
            with open(self.path, "wb") as out, open(self.body, "rb") as body:
                out.write(len(text).to_bytes(8, "little") + text)
                shutil.copyfileobj(body, out, 16 << 20)
        self.body.unlink()
