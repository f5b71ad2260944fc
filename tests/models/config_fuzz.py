"""Variants of config.json, and a judge: ours computes what transformers computes with a variant, or refuses it by name.

A variant is the config of a tiny model with keys dropped, added or changed, in the spelling of the hub or of
transformers 5. Weights are those of the model that transformers builds from the variant, so shapes always fit what
transformers understands. The sequence is longer than every window and every original context length.
"""

import copy
import hashlib
import json
import logging
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file
from transformers.initialization import no_init_weights

from anabranch.engine.single import SingleSequence
from anabranch.loader.load import load_model
from anabranch.models.config import ModelConfig, read_config
from anabranch.models.keys import ConfigError
from tests.models import tiny

TOLERANCE = 2e-3
"""Largest difference of a logit (they have a standard deviation of about 1). A key read wrongly moves one by 0.02 and
more; rounding by 1e-5, unless it tips a router's choice, which the seed avoids in the unchanged models."""
LENGTH = 61
MAX_POSITION = 48
DROP = object()
FAMILIES = tuple(tiny.BASES)
Spelling = Literal["hub", "transformers"]

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
HYBRID = tuple(family for family in FAMILIES if family.startswith(("qwen3_5", "qwen3_next")))
LATENT = tuple(family for family in FAMILIES if family.startswith(("deepseek", "glm4_moe_lite")))
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "vocab_size": 61,
    "max_position_embeddings": MAX_POSITION,
}
OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 8},
    "glm4_moe": {"head_dim": 8},
    "gpt_oss": {"head_dim": 8, "sliding_window": 7},
    "gemma4_text": {"layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 7},
    "gemma4": {"layer_types": [SLIDING, FULL, SLIDING, FULL], "sliding_window": 7},
    **{family: {"layer_types": [LINEAR, FULL, LINEAR, FULL]} for family in HYBRID},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key set or dropped; `outer`: of the object around `text_config`."""

    key: str
    value: Any
    outer: bool = False

    def __str__(self) -> str:
        shown = "dropped" if self.value is DROP else json.dumps(self.value)
        return f"{'outer ' if self.outer else ''}{self.key}={shown}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    family: str
    spelling: Spelling
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return f"{self.family} ({self.spelling}): {', '.join(map(str, self.changes))}"

    @property
    def config(self) -> dict[str, Any]:
        config = copy.deepcopy(base(self.family, self.spelling))
        inner = config.get("text_config", config)
        for change in sorted(self.changes, key=lambda change: change.outer):
            target = config if change.outer else inner
            if change.value is DROP:
                target.pop(change.key, None)
            else:
                target[change.key] = copy.deepcopy(change.value)
        return config


_BASES: dict[tuple[str, str], dict[str, Any]] = {}


def base(family: str, spelling: Spelling) -> dict[str, Any]:
    """The unchanged config, all keys written out."""
    if (family, spelling) not in _BASES:
        config_class, _ = tiny.ARCHITECTURES[family]
        settings = tiny.BASES[family] | SIZES | OWN.get(family, {})
        if family in tiny.TEXT_CONFIGS:
            vision = {} if family == "gemma4" else {"vision_config": tiny.QWEN3_5_VISION}
            config = config_class(text_config=tiny.TEXT_CONFIGS[family](**settings), **vision)
        else:
            config = config_class(**settings)
        raw = json.loads(config.to_json_string())
        inner = raw.get("text_config", raw)
        inner.setdefault("dtype", "float32")
        if "use_sliding_window" in inner:
            inner["sliding_window"] = 7  # transformers writes 0 or null where it is not used
        if spelling == "hub":
            if inner["model_type"] == "gemma4_text":
                tiny.to_hub_gemma4(inner)
            elif inner is raw:
                tiny.to_hub_flat(raw)
        _BASES[family, spelling] = raw
    return _BASES[family, spelling]


# ---------------------------------------------------------------------------------------------------------------------
# Changes
# ---------------------------------------------------------------------------------------------------------------------

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}
FLAT_ROPES: list[Any] = [
    None,
    {},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 700.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0},
    {"rope_type": "linear"},
    {"rope_type": "linear", "type": "default", "factor": 2.0},
    {"rope_type": "linear", "factor": 0.5},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "rope_theta": 700.0, "factor": 2.0},
    {"rope_type": "proportional"},
    LLAMA3,
    LLAMA3 | {"original_max_position_embeddings": 16},
    LLAMA3 | {"original_max_position_embeddings": 32, "rope_theta": 300.0},
    LLAMA3 | {"original_max_position_embeddings": 32, "high_freq_factor": 1.0},
    LLAMA3 | {"original_max_position_embeddings": 32, "low_freq_factor": 4.0, "high_freq_factor": 2.0},
    *(
        {k: v for k, v in LLAMA3.items() if k != lacking}
        for lacking in ("factor", "low_freq_factor", "high_freq_factor")
    ),
    YARN,
    {"type": "yarn", "factor": 4.0},
    YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False, "rope_theta": 300.0},
    YARN | {"truncate": None, "attention_factor": 0.7},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    YARN | {"mscale": 0.7, "mscale_all_dim": 0},
    YARN | {"factor": None},
    YARN | {"factor": 0.5, "beta_fast": 0},
    YARN | {"partial_rotary_factor": 0.5},
    LONGROPE | {"original_max_position_embeddings": 64},
    LONGROPE | {"original_max_position_embeddings": 64, "factor": 4.0, "rope_theta": 300.0},
    LONGROPE | {"original_max_position_embeddings": 16},
    LONGROPE | {"original_max_position_embeddings": 64, "short_factor": [1.0]},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_theta": 300.0},
    {"factor": 4.0},
]
NESTED_ROPES: list[Any] = [
    {SLIDING: {"rope_type": "default", "rope_theta": 300.0}, FULL: {"rope_type": "default", "rope_theta": 900.0}},
    {
        SLIDING: {"rope_type": "default", "rope_theta": 300.0},
        FULL: {"rope_type": "proportional", "rope_theta": 900.0, "partial_rotary_factor": 0.5},
    },
    {
        SLIDING: {"rope_type": "linear", "rope_theta": 300.0, "factor": 2.0},
        FULL: {**LLAMA3, "rope_theta": 900.0},
    },
    {SLIDING: {**YARN, "rope_theta": 300.0}, FULL: {"rope_type": "default", "rope_theta": 900.0}},
    {SLIDING: {"rope_type": "default"}, FULL: {"rope_type": "proportional", "rope_theta": 900.0}},
    {SLIDING: {"rope_theta": 300.0}, FULL: {"type": "linear", "factor": 2.0, "rope_theta": 900.0}},
    {FULL: {"rope_type": "default", "rope_theta": 900.0}},
    {SLIDING: {"rope_type": "default", "rope_theta": 900.0}},
    {SLIDING: None, FULL: {"rope_type": "default", "rope_theta": 900.0}},
    {SLIDING: {"rope_type": "linear", "rope_theta": 300.0}, FULL: {"rope_type": "default", "rope_theta": 900.0}},
]
ROPES = FLAT_ROPES + NESTED_ROPES
ROPE_KEYS = (
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "max_position_embeddings",
)

SWITCH: list[Any] = [True, False, None, DROP]
VALUES: dict[str, list[Any]] = {
    "rope_scaling": [DROP, *ROPES],
    "rope_parameters": [DROP, *ROPES],
    "rope_theta": [DROP, None, 500.0, 1_000_000],
    "partial_rotary_factor": [0.5, 1.0, None],
    "original_max_position_embeddings": [16, 4096],
    "max_position_embeddings": [DROP, 24, 4096],
    "hidden_act": [DROP, None, "silu", "gelu_pytorch_tanh", "gelu", "relu", "swish"],
    "hidden_activation": [DROP, None, "silu", "gelu_pytorch_tanh", "gelu"],
    "is_causal": [True, False, None],
    "tie_word_embeddings": SWITCH,
    "head_dim": [DROP, None, 0, 4, 8, 12, 7],
    "num_attention_heads": [DROP, 2, 8],
    "num_key_value_heads": [DROP, None, 1, 2, 4],
    "num_hidden_layers": [1, 2, 5],
    "hidden_size": [DROP, 24, 32],
    "intermediate_size": [12, "20"],
    "vocab_size": [97],
    "sliding_window": [DROP, None, 0, 1, 5, 200],
    "use_sliding_window": SWITCH,
    "max_window_layers": [DROP, None, 0, 1, 2],
    "layer_types": [
        DROP,
        None,
        [FULL] * 4,
        [SLIDING] * 4,
        [FULL, SLIDING, FULL, SLIDING],
        [SLIDING, SLIDING, FULL, FULL],
        [SLIDING, FULL],
        ["chunked_attention", FULL, FULL, FULL],
    ],
    "attention_bias": SWITCH,
    "qkv_bias": SWITCH,
    "mlp_bias": SWITCH,
    "rms_norm_eps": [DROP, None, 1e-2, 1],
    "norm_topk_prob": SWITCH,
    "num_experts": [DROP, None, 0, 3, 7],
    "num_local_experts": [DROP, None, 3, 7],
    "num_experts_per_tok": [DROP, 1, 3],
    "top_k_experts": [DROP, 1, 3],
    "moe_intermediate_size": [12],
    "shared_expert_intermediate_size": [12],
    "mlp_only_layers": [DROP, None, [], [0], [1, 2], [0, 1, 2, 3], [-1], [9], ["1"]],
    "decoder_sparse_step": [DROP, None, 1, 2, 3, 9],
    "clip_qkv": [DROP, None, 0.3, 0],
    "final_logit_softcapping": [DROP, None, 0.5, 0.0, 30],
    "attention_k_eq_v": SWITCH,
    "global_head_dim": [DROP, None, 4, 12, 16],
    "num_global_key_value_heads": [DROP, None, 1, 2, 4],
    "per_layer_config": [
        DROP,
        None,
        {},
        {"1": {"head_dim": 12}, "3": {"head_dim": 12}},
        {"01": {"head_dim": 12}, "03": {"head_dim": 12}},
        {"1": {"num_key_value_heads": 1}, "3": {"num_key_value_heads": 1}},
        {"0": {"intermediate_size": 12}},
        {"0": {"sliding_window": 3}, "2": {"sliding_window": 3}},
        {"0": {"rms_norm_eps": 0.1}},
        {"1": {"skip": ["mlp"]}},
    ],
    "enable_moe_block": SWITCH,
    "use_double_wide_mlp": SWITCH,
    "num_kv_shared_layers": [DROP, None, 0, 1, 2],
    "hidden_size_per_layer_input": [DROP, None, 0, 8],
    "vocab_size_per_layer_input": [DROP, 7],
    "use_bidirectional_attention": [None, "vision", "all", True, False],
    "dtype": [DROP, "bfloat16"],
    "torch_dtype": ["bfloat16", "float16"],
    "text_config": [None, {}, {"hidden_size": 24, "rope_theta": 300.0, "hidden_act": "gelu_pytorch_tanh"}],
    # keys that other families obey, or that matter in training only
    "attention_dropout": [0.3],
    "router_jitter_noise": [0.3],
    "output_router_logits": [True],
    "pretraining_tp": [2],
    "attention_chunk_size": [5],
    "attn_logit_softcapping": [1.0],
    "query_pre_attn_scalar": [3],
    "attention_multiplier": [0.1],
    "logits_scaling": [3.0],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.3],
    "layer_norm_eps": [0.1],
    "use_qk_norm": [True, False],
    "no_rope_layers": [[0, 1, 0, 1]],
    "sliding_window_pattern": [2],
    "sliding_window_size": [3],
    "rope_local_base_freq": [300.0],
    "rotary_pct": [0.5],
    "swiglu_limit": [7.0, 5.0, None],
    "experts_per_token": [3],
    "initial_context_length": [16],
    "num_shared_experts": [1],
    "first_k_dense_replace": [2],
    "routed_scaling_factor": [2.0],
    "scoring_func": ["sigmoid"],
    "cache_implementation": ["hybrid"],
    "temperature": [0.3],
    "pad_token_id": [3, None],
    "chunk_size_feed_forward": [3],
    "is_decoder": [False],
    "is_encoder_decoder": [True],
}
OUTER: dict[str, list[Any]] = {
    "tie_word_embeddings": SWITCH,
    "text_config": [DROP, None, {}],
    "is_causal": [False],
    "rope_scaling": [{"type": "linear", "factor": 3.0}, NESTED_ROPES[0]],
    "rope_parameters": NESTED_ROPES[:2],
    "rope_theta": [300.0],
    "hidden_activation": ["silu"],
    "final_logit_softcapping": [0.5],
    "hidden_size": [24],
    "sliding_window": [3],
    "rms_norm_eps": [0.1],
    "attention_k_eq_v": [False],
    "per_layer_config": [{"1": {"head_dim": 12}, "3": {"head_dim": 12}}],
    "dtype": ["bfloat16"],
    "use_bidirectional_attention": ["all"],
    "hidden_size_per_layer_input": [8],
}
HYBRID_VALUES: dict[str, list[Any]] = {
    "layer_types": [[LINEAR] * 4, [LINEAR, FULL, FULL, LINEAR], [FULL, "attention", FULL, LINEAR]],
    "full_attention_interval": [DROP, None, 1, 2, 9],
    "partial_rotary_factor": [DROP, 0.3, 0.01, 2.0],
    "rope_parameters": [
        {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ],
    "linear_num_key_heads": [DROP, None, 0, 1, 3, 4],
    "linear_num_value_heads": [DROP, 2, 3, 6],
    "linear_key_head_dim": [DROP, 4, 5],
    "linear_value_head_dim": [DROP, 4, 5],
    "linear_conv_kernel_dim": [DROP, 1, 2, 5],
    "attn_output_gate": SWITCH,
    "mamba_ssm_dtype": ["float32", "bfloat16"],
}
"""Of families with delta nets."""
LATENT_VALUES: dict[str, list[Any]] = {
    "q_lora_rank": [DROP, None, 8],
    "kv_lora_rank": [8, 0],
    "qk_nope_head_dim": [4, 8],
    "qk_rope_head_dim": [4, 6, 7],
    "v_head_dim": [4, 24],
    "qk_head_dim": [4],
    "rope_interleave": SWITCH,
    "n_routed_experts": [DROP, None, 0, 3, 4, 8],
    "n_shared_experts": [DROP, None, 1, 2, 0],
    "n_group": [DROP, None, 1, 2, 3, 6],
    "topk_group": [DROP, None, 1, 2, 3],
    "topk_method": [DROP, None, "greedy", "group_limited_greedy", "noaux_tc", "other"],
    "scoring_func": ["softmax", "sigmoid"],
    "norm_topk_prob": [None],
    "routed_scaling_factor": [DROP, None, 0.5],
    "first_k_dense_replace": [DROP, None, 0, 1, 2, 9],
    "mlp_layer_types": [DROP, None, ["dense"] * 4, ["sparse", "dense", "sparse", "dense"], ["sparse"], ["moe"] * 4],
    "moe_layer_freq": [1, 2],
    "num_nextn_predict_layers": [0, 1, None],
    "num_mtp_layers": [0, 1],
    "rope_scaling": [YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, YARN | {"mscale": 1.0, "mscale_all_dim": 0}],
    "rope_parameters": [
        YARN | {"rope_theta": 500.0, "mscale_all_dim": 1.0},
        YARN | {"rope_theta": 500.0, "mscale_all_dim": True},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0, "mscale_all_dim": 1.0},
    ],
}
"""Of families with latent attention."""
PARTIAL_ROPES: list[Any] = [
    {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.25},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
]
OWN_VALUES: dict[str, dict[str, list[Any]]] = {
    "glm4_moe": {
        "partial_rotary_factor": [DROP, 0.25, 0.01, 2.0],
        "rope_parameters": PARTIAL_ROPES,
        "n_routed_experts": [DROP, None, 0, 3, 7],
        "n_shared_experts": [DROP, None, 0, 2],
        "n_group": [DROP, None, 2, 3],
        "topk_group": [DROP, None, 2],
        "first_k_dense_replace": [DROP, None, 0, 1, 4, 9, -1],
        "routed_scaling_factor": [DROP, None, 0, 1],
        "use_qk_norm": SWITCH,
        "num_nextn_predict_layers": [DROP, 0, 2],
        "scoring_func": ["softmax"],
    },
    "ernie4_5_moe": {
        "moe_num_experts": [DROP, None, 0, 3, 7],
        "moe_k": [DROP, None, 1, 3],
        "moe_num_shared_experts": [DROP, None, 0, 1],
        "moe_layer_start_index": [DROP, None, 0, 1, 3, 9],
        "moe_layer_end_index": [DROP, None, -1, 0, 2, 9, -2],
        "moe_layer_interval": [DROP, None, 0, 1, 2, 3],
        "moe_norm_min": [DROP, None, 1e-12, 1e-3],
        "moe_use_aux_free": [True, False],
        "use_bias": SWITCH,
    },
    "minimax_m2": {
        "partial_rotary_factor": [DROP, 0.25, 0.01, 2.0],
        "rope_parameters": PARTIAL_ROPES,
        "scoring_func": ["softmax"],
        "shared_intermediate_size": [0, 12],
        "qk_norm_type": ["per_layer", "per_head"],
        "attn_type_list": [[1, 1, 1, 1], [0, 1, 1, 1]],
        "use_routing_bias": [True, False],
    },
}
"""Of one family."""
SWITCHES_THAT_MATTER = (("use_sliding_window", True), ("tie_word_embeddings", True))


def changes(family: str) -> list[Change]:
    found = [Change(key=key, value=value) for key, values in VALUES.items() for value in values]
    if family in HYBRID:
        found += [Change(key=key, value=value) for key, values in HYBRID_VALUES.items() for value in values]
    if family in LATENT:
        found += [Change(key=key, value=value) for key, values in LATENT_VALUES.items() for value in values]
    found += [Change(key=key, value=value) for key, values in OWN_VALUES.get(family, {}).items() for value in values]
    if family in tiny.TEXT_CONFIGS:
        found += [Change(key=key, value=value, outer=True) for key, values in OUTER.items() for value in values]
    return found


def singles(family: str) -> Iterator[Variant]:
    """Every change by itself: rope keys in both spellings, others in one or the other."""
    spellings: tuple[Spelling, Spelling] = ("hub", "transformers")
    for number, change in enumerate(changes(family)):
        for spelling in spellings if change.key in ROPE_KEYS else [spellings[number % 2]]:
            yield Variant(family=family, spelling=spelling, changes=(change,))


def combinations(family: str, count: int, seed: int) -> Iterator[Variant]:
    """`count` variants of two to four changes; half of them are combinations of rope keys."""
    draw = random.Random(f"{family} {seed}")
    everything = changes(family)
    of_rope = [change for change in everything if change.key in ROPE_KEYS]
    for _ in range(count):
        source = of_rope if draw.random() < 0.5 else everything
        chosen = {(c.key, c.outer): c for c in draw.sample(source, draw.randint(2, 4))}
        if draw.random() < 0.3:
            key, value = draw.choice(SWITCHES_THAT_MATTER)
            chosen.setdefault((key, False), Change(key=key, value=value))
        yield Variant(family=family, spelling=draw.choice(("hub", "transformers")), changes=tuple(chosen.values()))


# ---------------------------------------------------------------------------------------------------------------------
# The judge
# ---------------------------------------------------------------------------------------------------------------------

Verdict = Literal["equal", "refused", "transformers fails", "different", "wrong refusal"]


@dataclass(frozen=True, slots=True)
class Theirs:
    logits: torch.Tensor
    weights: dict[str, torch.Tensor]
    digest: bytes
    """Of the weights."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was computed before, of variants that say the same in other words."""

    verdicts: dict[str, tuple[Verdict, str]] = field(default_factory=dict)
    """By the text of config.json."""
    theirs: dict[str, "Theirs"] = field(default_factory=dict)
    """By all that transformers keeps of config.json, which its model is a function of."""
    logits: dict[tuple[ModelConfig, bytes], torch.Tensor] = field(default_factory=dict)
    """Ours, by all that they depend on: what was read of config.json, and a digest of the weights."""


def judge(variant: Variant, folder: Path, known: Known | None = None) -> tuple[Verdict, str]:
    """What became of a variant; the last two are faults. `folder` is written over."""
    known = known or Known()
    text = json.dumps(variant.config)
    (folder / "config.json").write_text(text)
    try:
        model_config = read_config(folder)
    except ConfigError as error:
        message = str(error)
        if len(message.splitlines()) != 1 or not any(named(change, message) for change in variant.changes):
            return "wrong refusal", message
        return "refused", message
    except Exception as error:  # anything else would be a traceback
        return "wrong refusal", repr(error)
    if text not in known.verdicts:
        known.verdicts[text] = compare(variant.family, folder, model_config, known)
    return known.verdicts[text]


def compare(family: str, folder: Path, model_config: ModelConfig, known: Known) -> tuple[Verdict, str]:
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(folder)
            if (kept := repr(state(config))) not in known.theirs:
                known.theirs[kept] = by_transformers(family, config)
    except Exception as error:  # of any kind: what transformers cannot run is not compared
        return "transformers fails", repr(error)
    theirs = known.theirs[kept]
    key = model_config, theirs.digest
    if key not in known.logits:
        save_file(theirs.weights, folder / "model.safetensors")
        try:
            known.logits[key] = by_ours(folder)
        except ValueError as error:  # tensors that do not fit what we read: said aloud, though late
            return "wrong refusal", str(error)
    difference = (known.logits[key] - theirs.logits).abs().amax().item()
    return ("equal" if difference <= TOLERANCE else "different"), f"{difference:.1e}"


def state(value: Any) -> Any:
    """Every attribute of a config, private ones too, in an order that does not depend on the file's."""
    if isinstance(value, transformers.PreTrainedConfig):
        return type(value).__name__, state(vars(value))
    if isinstance(value, dict):
        return sorted(((repr(key), state(item)) for key, item in value.items()), key=lambda pair: pair[0])
    return [state(item) for item in value] if isinstance(value, list) else value


def digest(weights: dict[str, torch.Tensor]) -> bytes:
    found = hashlib.blake2b()
    for name, tensor in weights.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.numpy())
    return found.digest()


def named(change: Change, message: str) -> bool:
    return f"'{change.key}'" in message or (change.key in ROPE_KEYS and "rope" in message)


def tokens() -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SIZES["vocab_size"], (LENGTH,), generator=generator).tolist()


@torch.no_grad()
def by_transformers(family: str, config: transformers.PreTrainedConfig) -> Theirs:
    """Logits and weights of transformers' model."""
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    _, model_class = tiny.ARCHITECTURES[family]
    with no_init_weights():  # `randomise` sets them all
        model = model_class(config).float().eval()
    model.tie_weights()  # a part of the initialisation
    tiny.randomise(model, seed=3)
    logits = model(input_ids=torch.tensor([tokens()]), use_cache=False)[0][0].float()
    if not logits.isfinite().all():
        raise ValueError("logits are not finite")
    weights = model.state_dict()
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        del weights["lm_head.weight"]
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    return Theirs(logits, weights, digest(weights))


def by_ours(folder: Path) -> torch.Tensor:
    model = load_model(folder, dtype="float32")
    return SingleSequence(model, max_length=LENGTH).forward(tokens())


class quiet:
    """transformers warns of most variants, and writes each config out for its log, for longer than it reads it."""

    def __enter__(self) -> None:
        self.repr = transformers.PreTrainedConfig.__repr__
        transformers.PreTrainedConfig.__repr__ = object.__repr__
        self.level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity(logging.CRITICAL)
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *_: object) -> None:
        transformers.PreTrainedConfig.__repr__ = self.repr
        self.warnings.__exit__(None, None, None)
        transformers.logging.set_verbosity(self.level)


FAULTS = ("different", "wrong refusal")


def faults(variants: Iterable[Variant], folder: Path) -> tuple[Counter[Verdict], list[str]]:
    """How variants were judged, and a line for each fault."""
    verdicts: Counter[Verdict] = Counter()
    found = []
    known = Known()
    for variant in variants:
        verdict, detail = judge(variant, folder, known)
        verdicts[verdict] += 1
        if verdict in FAULTS:
            found.append(f"{verdict}: {variant}: {detail}")
    return verdicts, found
