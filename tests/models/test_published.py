"""Configs as their authors publish them, with all their keys: each key is read, or known not to change what a model
computes; and a model of these keys with small sizes computes what transformers computes with it.

`published/` has published files as public repositories quote them (gpt-oss-20b, deepseek-v2-lite, deepseek-v3, kimi-k2,
glm-4.7-flash, minimax-m2). Those of GLM-4.5, GLM-4.6 and ERNIE 4.5 are put together from the keys and sizes that their
authors give.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.engine.single import SingleSequence
from anabranch.loader.load import load_model
from anabranch.models import keys as reading
from anabranch.models.config import read_config
from tests.models import tiny

FILES = {path.stem: path for path in sorted(Path(__file__).with_name("published").glob("*.json"))}
TRAINING = [
    "attention_dropout",
    "aux_loss_alpha",
    "initializer_range",
    "moe_capacity",
    "moe_gate",
    "router_aux_loss_coef",
    "seq_aux",
]
DRAFT_LAYERS = ["mtp_transformer_layers", "num_mtp_modules", "num_nextn_predict_layers", "use_mtp"]
OTHER_PROGRAMS = [
    "auto_map",
    "bos_token_id",
    "ep_size",
    "pad_token_id",
    "pretraining_tp",
    "transformers_version",
    "use_cache",
]
RETURNED = ["output_router_logits"]
SAID_TWICE = {
    "experts_per_token": "num_experts_per_tok",
    "initial_context_length": "rope_scaling.original_max_position_embeddings",
}
UNREAD = {*TRAINING, *DRAFT_LAYERS, *OTHER_PROGRAMS, *RETURNED, *SAID_TWICE}
"""Keys that do not change a model's logits, here and in transformers."""
WITHOUT_GROUPS = {"deepseek-v2-lite": {"n_group", "topk_group"}}
"""Keys of a choice among groups of experts, which `topk_method` greedy does not make."""
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "vocab_size": tiny.VOCAB_SIZE,
    "n_routed_experts": 16,
    "num_local_experts": 16,
    "moe_num_experts": 16,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "moe_k": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 11,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FOR_TRANSFORMERS = {
    "minimax-m2": {"partial_rotary_factor": 0.5},  # it does not read rotary_dim
    "kimi-k2": {"model_type": "deepseek_v3"},  # as its modeling file, which is DeepSeek's
}

WITHOUT_DTYPE = ("gpt_oss", "minimax_m2")
"""Families that are published without a dtype."""


class Noted(dict[str, Any]):
    """A config that notes which of its keys are asked for."""

    def __init__(self, raw: dict[str, Any], asked: set[str]) -> None:
        super().__init__(raw)
        self.asked = asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_understood(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = json.loads(FILES[name].read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw))
    asked: dict[str, set[str]] = {}
    make = reading.Keys.__init__

    def noting(self: reading.Keys, raw: dict[str, Any], path: Path, name: str = "") -> None:
        make(self, Noted(raw, asked.setdefault(name, set())), path, name)

    monkeypatch.setattr(reading.Keys, "__init__", noting)
    config = read_config(tmp_path)
    assert len(config.layers) == raw["num_hidden_layers"] and config.vocab_size == raw["vocab_size"]
    assert bool(config.sources) == ("quantization_config" in raw)
    assert set(raw) - asked[""] - UNREAD - WITHOUT_GROUPS.get(name, set()) == set()
    assert set(raw.get("rope_scaling") or ()) <= asked.get("rope_scaling", set())


@pytest.mark.parametrize("name", FILES)
def test_dtype(name: str, tmp_path: Path) -> None:
    """All are published in bfloat16, and some do not say so."""
    raw = json.loads(FILES[name].read_text())
    for given in (raw, {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}):
        (tmp_path / "config.json").write_text(json.dumps(given))
        config = read_config(tmp_path)
        named = {"dtype", "torch_dtype"} & given.keys()
        assert config.names_dtype == bool(named)
        assert config.dtype == ("bfloat16" if named or raw["model_type"] in WITHOUT_DTYPE else "float32")


def scaled_down(raw: dict[str, Any]) -> dict[str, Any]:
    """The same keys with small sizes, and as many layers as show each kind. Weights are plain: formats have tests of
    their own."""
    num_layers = raw.get("first_k_dense_replace", 0) + 2
    small = {key: SIZES[key] if key in SIZES and value is not None else value for key, value in raw.items()}
    small |= {"num_hidden_layers": num_layers}
    small |= {key: raw[key][:num_layers] for key in ("layer_types", "attn_type_list") if key in raw}
    if "kv_lora_rank" in raw:
        small["num_key_value_heads"] = small["num_attention_heads"]
    if "moe_layer_end_index" in raw:
        small["moe_layer_end_index"] = num_layers - 1
    small.pop("quantization_config", None)
    return small


def test_what_is_said_twice_agrees() -> None:
    raw = json.loads(FILES["gpt-oss-20b"].read_text())
    assert raw["experts_per_token"] == raw["num_experts_per_tok"]
    assert raw["initial_context_length"] == raw["rope_scaling"]["original_max_position_embeddings"]


@pytest.mark.parametrize("name", [name for name in FILES if name != "glm-4.6"])  # GLM-4.5, but for its context
def test_small_models_of_these_keys(name: str, tmp_path: Path) -> None:
    small = scaled_down(json.loads(FILES[name].read_text()))
    theirs = small | FOR_TRANSFORMERS.get(name, {})
    config_class, model_class = tiny.ARCHITECTURES[theirs["model_type"]]
    model = model_class(config_class.from_dict(theirs)).eval()
    tiny.randomise(model, 1)
    model.save_pretrained(tmp_path, save_original_format=True)
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    tokens = torch.randint(tiny.VOCAB_SIZE, (61,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = tiny.Judge(tmp_path, theirs["model_type"]).logits(tokens)
    (tmp_path / "config.json").write_text(json.dumps(small))
    ours = SingleSequence(load_model(tmp_path, dtype="float32"), 64)
    found = torch.cat([ours.forward(part) for part in (tokens[:40], tokens[40:60], tokens[60:])])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
