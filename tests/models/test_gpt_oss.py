"""The config of gpt-oss as its authors publish it."""

import json
from pathlib import Path

import pytest

from anabranch.models.config import read_config

PUBLISHED = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


@pytest.mark.parametrize("given", ({}, {"dtype": None}, {"torch_dtype": "bfloat16"}))
def test_without_a_dtype_it_is_computed_in_bf16(given: dict[str, str], tmp_path: Path) -> None:
    """The published file has no such key: in fp32, weights and cache would take twice the memory."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | given))
    assert read_config(tmp_path).dtype == "bfloat16"


def test_a_dtype_that_is_given_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | {"torch_dtype": "float32"}))
    assert read_config(tmp_path).dtype == "float32"
