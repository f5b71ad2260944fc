"""Writes a tiny checkpoint of each family: config.json as on the hub, and random weights.

Sizes are multiples of 16 and heads are 64 wide, so that kernels which need such shapes are used.
"""

import ctypes
import json
import math
import struct
from pathlib import Path
from typing import Any

import torch

from anabranch.loader.load import build
from anabranch.loader.names import parameter_layouts, stored
from anabranch.models import family
from anabranch.models.config import read_config

VOCAB_SIZE = 97
MAX_LENGTH = 512

CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
"""What all families share; each adds the keys of its own (`Family.tiny`), and reads those it knows."""


def config(model_type: str) -> dict[str, Any]:
    """config.json of a model type."""
    own = family.known()[model_type].tiny.get(model_type, {})
    wrapped = "text_config" in own
    keys = {"text_config": {**CONFIG, **own["text_config"]}} if wrapped else {**CONFIG, **own}
    return keys | {"torch_dtype": "float32", "model_type": model_type}


def write(model_type: str, folder: Path, seed: int = 0) -> None:
    """Write a checkpoint folder of the family."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model_type)))
    generator = torch.Generator().manual_seed(seed)
    model = build(read_config(folder), torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, target, layouts in parameter_layouts(model):
        for theirs, shape in stored(target, layouts):
            noise = torch.randn(shape, generator=generator)
            if len(shape) > 1:  # outputs as large as inputs; router weights larger, so that no choice is close
                tensors[theirs] = noise * shape[-1] ** -0.5 * (8 if ".router." in name else 1)
            else:
                tensors[theirs] = noise * 0.1 + (0 if name.endswith("bias") else 1)
    write_safetensors(folder / "model.safetensors", tensors)


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write fp32 tensors: the length of a header, the header, the bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * math.prod(tensor.shape)
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
