"""Frequencies and factors of every rope type against transformers' own functions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from anabranch.layers.rotary import Rotary
from anabranch.models.keys import Keys
from anabranch.models.rope import read_rope

YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 262_144}
LONGROPE |= {"short_factor": [1 + i / 8 for i in range(32)], "long_factor": [9.0] * 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    LLAMA3 | {"original_max_position_embeddings": 8192},
    YARN,
    YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},  # gpt-oss
    YARN | {"rope_theta": 1e4, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},  # DeepSeek V3
    YARN | {"rope_theta": 1e4, "factor": 40.0, "mscale": 0.5, "mscale_all_dim": 0.8},
    YARN | {"attention_factor": 0.75, "beta_fast": 8.0, "beta_slow": 3.0},
    YARN | {"factor": 1.0, "original_max_position_embeddings": 16},  # one pair for both ends of the range
    YARN | {"original_max_position_embeddings": 1 << 30, "rope_theta": 20.0},  # the range ends after the last pair
    LONGROPE,
    LONGROPE | {"factor": 4.0},
    LONGROPE | {"factor": 4.0, "attention_factor": 1.1},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: json.dumps(p)[:90])
def test_frequencies(parameters: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=131_072, rope_parameters={**parameters})
    expected_F, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    keys = Keys({"max_position_embeddings": 131_072, "rope_parameters": parameters}, Path("config.json"))
    rope = read_rope(keys, 64, 10_000.0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    rotary = Rotary(rope)
    position_T = torch.tensor([0, 1, 77, 4095])
    cos_TF, sin_TF = rotary(position_T)
    torch.testing.assert_close(rotary.frequency_F, expected_F, rtol=1e-6, atol=0)
    angle_TF = position_T[:, None] * expected_F
    torch.testing.assert_close(cos_TF, angle_TF.cos() * factor, rtol=0, atol=2e-3)
    torch.testing.assert_close(sin_TF, angle_TF.sin() * factor, rtol=0, atol=2e-3)
