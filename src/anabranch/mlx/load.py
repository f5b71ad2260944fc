"""Loads a model folder into MLX with mlx_lm, after refusing what cannot run or does not fit.

Memory is checked before the first weight is read: a Mac that runs out of memory does not fail an allocation, it swaps,
and then its kernel panics.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from anabranch.config import EngineConfig
from anabranch.formats import ITEM_BYTES
from anabranch.loader.checkpoint import read_checkpoint
from anabranch.loader.read import own_head
from anabranch.mlx import families, memory
from anabranch.models.config import ModelConfig
from anabranch.platforms import Platform

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
SERVED = {
    "load_format": (("safetensors",), "MLX reads safetensors alone"),
    "moe_combine": (("auto", "fastest"), "mlx_lm sums experts in its own way"),
    "shared_expert": (("auto", "inline"), "mlx_lm runs a shared expert after the routed ones"),
    "tune": (("off", "fast"), "none of our kernels run in MLX, so there is nothing to measure"),
}
"""Of options for torch: the values that work with MLX, and why no others do."""
PACKED_FILES = "model*.safetensors"
"""Those that mlx_lm reads."""


@dataclass(frozen=True, slots=True)
class Loaded:
    model: nn.Module
    dtype: str
    """Of activations, keys and values."""
    num_bytes: int


def load(
    config: EngineConfig, model: ModelConfig, platform: Platform, progress: Callable[[int, int], None] | None = None
) -> Loaded:
    folder = Path(config.model)
    for name, (values, reason) in SERVED.items():
        if getattr(config, name) not in values:
            raise ValueError(f"{name} {getattr(config, name)}: {reason}; use {' or '.join(values)}")
    families.check(model, config.max_model_len)
    raw = json.loads((folder / "config.json").read_text())
    dtype = config.dtype
    check_dtype(dtype, model, platform)
    memory.guard(config, model, dtype, weight_bytes(folder, raw, model, dtype), platform.memory())
    try:
        keys = families.hub_keys(model, nested="text_config" in raw)
        loaded, _ = load_model(folder, lazy=True, model_config=keys, get_model_classes=_classes)
    except ValueError as error:  # strict loading: tensors that are missing or left over
        raise ValueError(f"{folder}: mlx_lm does not load it: {' '.join(str(error).split())[:300]}") from error
    loaded.set_dtype(DTYPES[dtype])
    return Loaded(loaded, dtype, _read(loaded, progress))


def _classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    own: Any = families.FAMILIES[config["model_type"]].module
    return _get_classes(config) if own is None else (own.Model, own.Args)


def check_dtype(dtype: str, model: ModelConfig, platform: Platform) -> None:
    """ValueError unless MLX computes this model in a dtype. Experts that are not packed need Metal for less than 32
    bits."""
    sparse = any(layer.moe for layer in model.layers)
    if dtype != "float32" and sparse and not model.packed and not platform.has("metal"):
        raise ValueError(f"dtype {dtype}: MLX's CPU backend multiplies experts in float32 alone; use auto or float32")


def weight_bytes(folder: Path, raw: dict[str, Any], model: ModelConfig, dtype: str) -> int:
    """What the weights will take in memory. Packed ones take what they take on disk."""
    if "quantization" in raw:
        files = list(folder.glob(PACKED_FILES))
        if not files:
            raise ValueError(f"{folder}: holds no {PACKED_FILES}; give a folder that mlx_lm.convert wrote")
        return sum(file.stat().st_size for file in files)
    if "quantization_config" in {**raw, **raw.get("text_config", {})}:
        raise ValueError(
            f"{folder}: 'quantization_config' is not MLX's own packing, which alone is proven here; convert the"
            " original weights (mlx_lm.convert -q)"
        )
    checkpoint = read_checkpoint(folder)
    if model.tie_embeddings and (head := own_head(checkpoint)) is not None:
        raise ValueError(
            f"{head.file}: tensor {head.name!r} differs from the embedding although config.json says"
            " tie_word_embeddings; set that to false"
        )
    fused = next((name for name in checkpoint.tensors if name.endswith(".mlp.experts.gate_up_proj")), None)
    if fused is not None:
        raise ValueError(
            f"{folder}: tensor {fused!r} holds all experts of a layer, which mlx_lm's {model.model_type} does not read;"
            " take the published checkpoint, with a tensor for each expert"
        )
    return sum(tensor.num_elements for tensor in checkpoint.tensors.values()) * ITEM_BYTES[dtype]


def _read(model: nn.Module, progress: Callable[[int, int], None] | None) -> int:
    """Read one parameter after another, so that only one layer's experts are in memory twice while they are stacked.
    Returns the bytes of all."""
    arrays: list[Any] = [array for _, array in tree_flatten(model.parameters())]
    total, done = sum(array.nbytes for array in arrays), 0
    for array in arrays:
        mx.eval(array)
        done += array.nbytes
        if progress is not None:
            progress(done, total)
    return total
