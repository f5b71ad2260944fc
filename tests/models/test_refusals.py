"""Configs that cannot be served are refused before any weight is read: one line, with the file and the key at fault.

The bases are written as model authors publish them, and are accepted as they stand.
"""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from anabranch.models.config import read_config

MISSING = object()

DENSE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
ROUTED = DENSE | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
GEMMA4_TEXT = {
    key: value for key, value in ROUTED.items() if key not in ("hidden_act", "rope_theta", "norm_topk_prob")
} | {
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
    },
}
HYBRID = DENSE | {
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "shared_expert_intermediate_size": 28,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BASES: dict[str, dict[str, Any]] = {
    "llama": DENSE | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": DENSE | {"model_type": "qwen3", "head_dim": 16},
    "qwen2_moe": ROUTED | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28},
    "qwen3_moe": ROUTED | {"model_type": "qwen3_moe", "head_dim": 16},
    "mixtral": DENSE | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": ROUTED | {"model_type": "olmoe"},
    "qwen3_5_text": HYBRID | {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", "text_config": ROUTED | HYBRID | {"model_type": "qwen3_5_moe_text"}},
    "qwen3_next": ROUTED | HYBRID | {"model_type": "qwen3_next"},
    "glm4_moe": ROUTED | {"model_type": "glm4_moe", "n_routed_experts": 6, "attention_bias": True},
    "ernie4_5_moe": ROUTED | {"model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2},
    "minimax_m2": DENSE
    | {"model_type": "minimax_m2", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "gpt_oss": DENSE
    | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16},
    "gemma4_text": GEMMA4_TEXT,
    "gemma4": {"model_type": "gemma4", "text_config": GEMMA4_TEXT, "vision_config": None, "audio_config": None},
}

# (base, changes, what the message has to name)
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "mamba"}, "model_type"),
    ("llama", {"model_type": "llama4"}, "model_type"),
    ("llama", {"model_type": MISSING}, "model_type"),
    ("llama", {"model_type": ["llama"]}, "model_type"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
    # keys that every config has to have
    ("llama", {"hidden_size": MISSING}, "hidden_size"),
    ("llama", {"num_hidden_layers": MISSING}, "num_hidden_layers"),
    ("llama", {"num_attention_heads": None}, "num_attention_heads"),
    ("llama", {"vocab_size": MISSING}, "vocab_size"),
    ("llama", {"intermediate_size": MISSING}, "intermediate_size"),
    ("qwen2_moe", {"shared_expert_intermediate_size": MISSING}, "shared_expert_intermediate_size"),
    ("qwen3_moe", {"num_experts": MISSING}, "num_experts"),
    ("qwen3_moe", {"num_experts_per_tok": MISSING}, "num_experts_per_tok"),
    ("qwen3_moe", {"moe_intermediate_size": MISSING}, "moe_intermediate_size"),
    ("mixtral", {"num_local_experts": MISSING}, "num_local_experts"),
    ("gemma4_text", {"top_k_experts": MISSING}, "top_k_experts"),
    ("gemma4", {"num_experts": None}, "num_experts"),
    # values that are no sizes
    ("llama", {"hidden_size": -32}, "hidden_size"),
    ("llama", {"hidden_size": "32"}, "hidden_size"),
    ("llama", {"hidden_size": 32.5}, "hidden_size"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("llama", {"vocab_size": -1}, "vocab_size"),
    ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ("llama", {"rope_theta": 0}, "rope_theta"),
    ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ("qwen3", {"head_dim": -16}, "head_dim"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": -4}, "sliding_window"),
    ("mixtral", {"sliding_window": -4}, "sliding_window"),
    ("mixtral", {"sliding_window": 0}, "sliding_window"),  # transformers masks every token
    ("qwen2_moe", {"layer_types": ["sliding_attention", "full_attention"]}, "use_sliding_window"),
    ("gemma4", {"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
    ("mixtral", {"num_local_experts": -6}, "num_local_experts"),
    ("qwen3_moe", {"moe_intermediate_size": -1}, "moe_intermediate_size"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
    ("olmoe", {"clip_qkv": -8.0}, "clip_qkv"),
    ("gemma4_text", {"sliding_window": 0}, "sliding_window"),
    ("gemma4_text", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma4_text", {"layer_types": ["linear_attention", "full_attention"]}, "layer_types"),
    ("qwen3_5_moe", {"shared_expert_intermediate_size": MISSING}, "shared_expert_intermediate_size"),
    ("qwen3_5_text", {"layer_types": ["linear_attention", "sliding_attention"]}, "layer_types"),
    ("qwen3_5_text", {"layer_types": MISSING, "full_attention_interval": 0}, "full_attention_interval"),
    ("qwen3_5_text", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),  # the convolution's too
    ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ("qwen3_5_text", {"partial_rotary_factor": None}, "partial_rotary_factor"),  # transformers turns all
    ("qwen3_5_text", {"partial_rotary_factor": 0.2}, "partial_rotary_factor"),  # 3 of 16
    ("qwen3_5_text", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_key_heads"),
    ("glm4_moe", {"n_routed_experts": MISSING}, "n_routed_experts"),
    ("glm4_moe", {"n_group": 2}, "n_group"),
    ("glm4_moe", {"topk_group": 2}, "topk_group"),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
    ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts"),
    ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ("glm4_moe", {"num_local_experts": 7}, "num_local_experts"),
    ("ernie4_5_moe", {"moe_k": MISSING, "num_experts_per_tok": MISSING}, "moe_k"),
    ("ernie4_5_moe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    ("ernie4_5_moe", {"moe_num_experts": MISSING, "num_experts": MISSING}, "moe_num_experts"),
    ("ernie4_5_moe", {"moe_norm_min": 1e-3}, "moe_norm_min"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
    ("ernie4_5_moe", {"moe_use_aux_free": False}, "moe_use_aux_free"),
    ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func"),
    ("minimax_m2", {"shared_intermediate_size": 24}, "shared_intermediate_size"),
    ("minimax_m2", {"attn_type_list": [0, 1]}, "attn_type_list"),
    ("minimax_m2", {"rotary_dim": "8"}, "rotary_dim"),
    ("minimax_m2", {"partial_rotary_factor": 1.0}, "rotary_dim"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
    ("gpt_oss", {"sliding_window": None}, "sliding_window"),
    ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    # sizes that do not go together
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads"),
    ("gemma4_text", {"num_global_key_value_heads": 3}, "key_value_heads"),
    ("qwen3", {"head_dim": 15}, "head_dim"),
    ("gemma4", {"global_head_dim": 15}, "head_dim"),
    ("qwen2_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("qwen3_moe", {"num_local_experts": 7}, "num_local_experts"),
    ("mixtral", {"num_experts": 7}, "num_experts"),
    ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("olmoe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
    ("gemma4", {"top_k_experts": 7}, "top_k_experts"),
    # what is not built
    ("llama", {"hidden_act": "relu2"}, "hidden_act"),
    ("gemma4_text", {"hidden_activation": "gelu"}, "hidden_activation"),  # the exact gelu is not the tanh one
    ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "'factor'"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
    ("llama", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 64}}, "'max_position_embeddings' = 64"),
    ("llama", {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3}}, "'short_factor'"),
    ("llama", {"rope_scaling": LONGROPE | {"short_factor": [1.0, "2", 3.0, 4.0]}}, "'short_factor'"),
    ("qwen3_moe", {"rope_parameters": {"rope_type": "foo", "rope_theta": 10_000.0}}, "rope"),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "foo", "rope_theta": 1e6}}}, "rope"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "'factor'"),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "factor"}}, "'factor'"),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "'low_freq_factor'"),
    ("llama", {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "high_freq_factor"}}, "'high_freq_factor'"),
    ("llama", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "'high_freq_factor'"),
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    # one of the two replaces the other: a base that would be lost is asked for
    (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}},
        "rope_theta",
    ),
    ("qwen2_moe", {"rope_parameters": GEMMA4_TEXT["rope_parameters"]}, "rope_parameters"),
    ("qwen3", {"rope_scaling": GEMMA4_TEXT["rope_parameters"]}, "rope_scaling"),
    ("gemma4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters"),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "sliding_attention"),
    ("gemma4", {"rope_parameters": {}}, "rope_parameters"),
    ("gemma4_text", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ("llama", {"is_causal": False}, "is_causal"),
    ("qwen3_moe", {"is_causal": None}, "is_causal"),  # transformers takes null for false
    ("gemma4", {"is_causal": False}, "is_causal"),
    ("llama", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
    ("gemma4", {"per_layer_config": {"0": {"intermediate_size": 8}}}, "per_layer_config"),
    ("gemma4", {"per_layer_config": {"7": {"head_dim": 8}}}, "per_layer_config"),
    ("llama", {"eos_token_id": "2"}, "eos_token_id"),
    # more than any model has: refused before anything is built
    ("llama", {"num_hidden_layers": 100_000}, "num_hidden_layers"),
    ("qwen3_moe", {"num_experts": 100_000}, "num_experts"),
    ("qwen3_moe", {"num_hidden_layers": 1000, "num_experts": 4000}, "num_experts"),
    ("gemma4", {"head_dim": 1 << 20}, "head_dim"),
    ("llama", {"hidden_size": 10**40}, "hidden_size"),
    ("llama", {"vocab_size": 1 << 40}, "vocab_size"),
    ("llama", {"intermediate_size": 1 << 40}, "intermediate_size"),
    ("llama", {"torch_dtype": "float8_e4m3fn"}, "dtype"),
    ("qwen3_moe", {"quantization_config": {"quant_method": "modelopt"}}, "quantization_config"),
    ("gemma4", {"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config"),
    ("gemma4_text", {"hidden_size_per_layer_input": 16}, "hidden_size_per_layer_input"),
    ("gemma4", {"hidden_size_per_layer_input": MISSING}, "hidden_size_per_layer_input"),  # the family's default is 256
    ("gemma4", {"num_kv_shared_layers": 1}, "num_kv_shared_layers"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
]


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(base: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The base with keys set or taken away; in a config that wraps another, those of the inner one."""
    config = BASES[base]
    inner = config.get("text_config", config)
    inner = {key: value for key, value in (inner | changes).items() if value is not MISSING}
    return config | {"text_config": inner} if "text_config" in config else inner


def refusal(folder: Path, file: str = "config.json") -> str:
    with pytest.raises(ValueError) as caught:
        read_config(folder)
    message = str(caught.value)
    assert f"/{file}: " in message
    assert message == message.strip() and len(message.splitlines()) == 1, f"not one line: {message!r}"
    return message


def describe(value: object) -> str | None:
    if not isinstance(value, dict):
        return None
    return ",".join(f"{key}={'missing' if setting is MISSING else setting}" for key, setting in value.items())


@pytest.mark.parametrize("base", BASES)
def test_base_is_accepted(base: str, tmp_path: Path) -> None:
    assert len(read_config(write(tmp_path, BASES[base])).layers) == 2


@pytest.mark.parametrize(("base", "changes", "key"), REFUSALS, ids=describe)
def test_refused_in_one_line_that_names_the_key(base: str, changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    assert key in refusal(write(tmp_path, changed(base, changes)))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00"])
def test_not_a_json_object(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    refusal(tmp_path)


BRACKETS = [b"[" * 100_000, b'{"a":' * 100_000, b'{"hidden_size": ' + b"[" * 900 + b"]" * 900 + b"}"]


@pytest.mark.parametrize("content", BRACKETS, ids=["lists", "objects", "a value"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_nested_brackets(name: str, content: bytes, tmp_path: Path) -> None:
    write(tmp_path, BASES["llama"])
    if content is BRACKETS[2]:
        content = content.replace(b"hidden_size", b"eos_token_id") if name != "config.json" else content
        content = json.dumps(BASES["llama"]).encode()[:-1] + b", " + content[1:]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path, name)
    assert len(message) < 500


def test_long_lists_are_read_in_linear_time(tmp_path: Path) -> None:
    dense = list(range(1, 2_000_000, 2))
    write(tmp_path, BASES["qwen3_moe"] | {"num_hidden_layers": 1024, "mlp_only_layers": dense})
    began = time.process_time()
    layers = read_config(tmp_path).layers
    assert [layer.moe is None for layer in layers] == [False, True] * 512
    assert time.process_time() - began < 5  # 0.2 s; with a search of the list for each layer half a minute


@pytest.mark.parametrize("key", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_gemma4_refusal_names_the_sizes(key: str, tmp_path: Path) -> None:
    message = refusal(write(tmp_path, changed("gemma4", {key: 16})))
    assert "E2B and E4B" in message and "26B-A4B" in message


def test_minimax_m2_rotary_dim(tmp_path: Path) -> None:
    """It is what published files have; transformers writes the share of a head."""
    published = read_config(write(tmp_path, BASES["minimax_m2"]))
    assert published.layers[0].attention.rope.rotary_dim == 8
    share = {"rotary_dim": MISSING, "rope_parameters": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}
    assert read_config(write(tmp_path, changed("minimax_m2", share))) == published


def test_no_config(tmp_path: Path) -> None:
    refusal(tmp_path)


def test_wrapped_config_is_no_object(tmp_path: Path) -> None:
    assert "text_config" in refusal(write(tmp_path, {"model_type": "gemma4", "text_config": "gemma4_text"}))


def test_wrapped_config_is_missing(tmp_path: Path) -> None:
    assert "text_config" in refusal(write(tmp_path, GEMMA4_TEXT | {"model_type": "gemma4"}))


def test_vision_only_bidirectional_attention_is_causal_for_text(tmp_path: Path) -> None:
    read_config(write(tmp_path, changed("gemma4", {"use_bidirectional_attention": "vision"})))


@pytest.mark.parametrize("model_type", ["llama", "remote_model"])
def test_code_in_the_folder_is_never_run(model_type: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
    for name in ("modeling_remote.py", "configuration_remote.py", "__init__.py", "setup.py"):
        (tmp_path / name).write_text(code)
    auto_map = {
        "AutoConfig": "configuration_remote.RemoteConfig",
        "AutoModelForCausalLM": "modeling_remote.RemoteForCausalLM",
    }
    write(tmp_path, BASES["llama"] | {"model_type": model_type, "auto_map": auto_map})
    if model_type == "llama":
        assert read_config(tmp_path).hidden_size == 32
    else:
        assert "model_type" in refusal(tmp_path)
    assert not ran.exists()
