"""A tiny checkpoint of each family, written here: config.json as the hub has it and random weights.

Sizes are multiples of 16 and heads 64 wide, so that kernels which want such shapes are used.
"""

from __future__ import annotations

import ctypes
import json
import math
import struct
from pathlib import Path
from typing import Any

import torch

from anabranch.loader.load import build
from anabranch.loader.names import parameter_layouts
from anabranch.models.config import read_config

VOCAB_SIZE = 97
MAX_LENGTH = 512

DENSE: dict[str, Any] = {
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
}
MOE = DENSE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GEMMA4_TEXT = DENSE | {
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen3": DENSE | {"head_dim": 64, "tie_word_embeddings": True},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    "qwen3_moe": MOE | {"head_dim": 64},
    "mixtral": DENSE | {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": MOE | {"intermediate_size": 32},
    "gemma4_text": GEMMA4_TEXT,
    "gemma4": {"text_config": GEMMA4_TEXT | {"tie_word_embeddings": True}, "torch_dtype": "float32"},
}


def write(model_type: str, folder: Path, seed: int = 0) -> None:
    """A checkpoint folder of the family."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | FAMILIES[model_type]))
    generator = torch.Generator().manual_seed(seed)
    model = build(read_config(folder), torch.float32)
    tensors: dict[str, torch.Tensor] = {}
    for name, target, layouts in parameter_layouts(model):
        for piece in layouts[-1]:
            shape = torch.empty(target.shape, device="meta")[piece.index].shape
            noise = torch.randn(shape, generator=generator)
            if len(shape) > 1:  # the sum over inputs keeps its size; routers are loud, so that no choice is a close one
                tensors[piece.name] = noise * shape[-1] ** -0.5 * (8 if ".router." in name else 1)
            else:
                tensors[piece.name] = noise * 0.1 + (0 if name.endswith("bias") else 1)
    write_safetensors(folder / "model.safetensors", tensors)


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """fp32 tensors: the length of a header, the header, the bytes."""
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
