"""Tiny random checkpoints, written by Hugging Face transformers, and what transformers computes with them.

`CASES` is the catalogue: one entry per trap. `save` writes one as a checkpoint folder, `Judge` loads such a folder
with transformers and gives the logits and the greedy continuation ours must reproduce. Each seed was chosen so that
no expert choice and no greedy step comes near a tie, every expert or nearly every one is chosen by some token, and the
continuation does not repeat a token or two for ever.

This file knows nothing of anabranch: a folder and token ids go in, tensors and token ids come out.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import load_file, save_file

NUM_NEW_TOKENS = 48
PROMPT_LENGTH = 53  # three whole pages of 16 and a part
VOCAB_SIZE = 131

ARCHITECTURES = {
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "gemma4_text": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    "gemma4": (transformers.Gemma4Config, transformers.Gemma4ForConditionalGeneration),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "qwen3_5": (transformers.Qwen3_5Config, transformers.Qwen3_5ForConditionalGeneration),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
}
TEXT_CONFIGS = {
    "gemma4": transformers.Gemma4TextConfig,
    "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig,
    "qwen3_5": transformers.Qwen3_5TextConfig,
}
"""Of configs that hold the text model's in `text_config`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint. `settings` go to the config class of `model_type`, on top of `DEFAULTS`."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    # "split": experts as each family is published (one tensor per expert; Gemma 4 fused). "fused": 3-D tensors.
    experts: Literal["split", "fused"] = "split"
    # "hub": config.json with the keys of the files that model authors publish, instead of those transformers 5 saves.
    keys: Literal["transformers", "hub"] = "transformers"
    sharded: bool = False
    dtype: str = "float32"  # on disk; the judge computes in float32
    hub_extra: dict[str, Any] = field(default_factory=dict)  # further keys of the published file
    extra_tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)  # tensors a loader has to pass over


DEFAULTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
QWEN2_MOE = DEFAULTS | {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = DEFAULTS | {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
GEMMA4 = DEFAULTS | {
    "num_hidden_layers": 7,  # sliding x 5, full, full
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 11,
}
GEMMA4_MOE = GEMMA4 | {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 12,
    "attention_k_eq_v": True,
}
MIXTRAL = DEFAULTS | {"num_local_experts": 6, "num_experts_per_tok": 2}
OLMOE = DEFAULTS | {"num_experts": 6, "num_experts_per_tok": 2}
QWEN3 = DEFAULTS | {"head_dim": 8}
GPT_OSS = DEFAULTS | {
    "num_hidden_layers": 4,  # sliding, full, sliding, full
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 11,
}
QWEN3_5 = DEFAULTS | {
    "num_hidden_layers": 4,  # delta net x 3, full attention
    "head_dim": 16,  # of which 4 turn
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    # The norm in a delta net may divide by numbers near 0. With the default, 1e-6, transformers' own logits of tiny
    # models differ by 1e-4 to 6e-4 when the embedding differs by 1e-7 of itself.
    "rms_norm_eps": 1e-2,
}
QWEN3_5_MOE = QWEN2_MOE | QWEN3_5
LATENT = DEFAULTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V2 = LATENT | {"n_shared_experts": 2, "first_k_dense_replace": 1}
DEEPSEEK_V3 = LATENT | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 32,  # so that 53 tokens see what it changes
}
GLM4_MOE = DEFAULTS | {
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
ERNIE4_5_MOE = DEFAULTS | {
    "moe_intermediate_size": 24,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_num_shared_experts": 2,
    "tie_word_embeddings": False,
}
MINIMAX_M2 = MIXTRAL | {"head_dim": 16}
QWEN3_5_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # so that 53 tokens see kept, blended and divided frequencies
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,  # so that pairs are kept, blended and divided
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1_000.0,
    "short_factor": [1.0, 1.3, 2.0, 3.5],
    "long_factor": [1.5, 4.0, 9.0, 30.0],
    "factor": 4.0,  # cosines and sines are multiplied by what follows from it
    "original_max_position_embeddings": DEFAULTS["max_position_embeddings"],
}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta} | more


def gemma4_rope(*, sliding_theta: float, full_theta: float, partial_rotary_factor: float) -> dict[str, Any]:
    return {
        "sliding_attention": rope(sliding_theta),
        "full_attention": rope(full_theta, rope_type="proportional", partial_rotary_factor=partial_rotary_factor),
    }


BASES = {
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "gemma4_text": GEMMA4_MOE,
    "gemma4": GEMMA4_MOE,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "llama": DEFAULTS,
    "qwen3": QWEN3,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_next": QWEN3_5_MOE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe_lite": LATENT,
    "glm4_moe": GLM4_MOE,
    "minimax_m2": MINIMAX_M2,
    "gpt_oss": GPT_OSS,
    "ernie4_5_moe": ERNIE4_5_MOE,
}


def case(name: str, *, settings: dict[str, Any], base: dict[str, Any] | None = None, **more: Any) -> Case:
    """Of the family that the name begins with, and what sets it apart from `base` (default: the family's)."""
    model_type = max((family for family in BASES if name.startswith(family)), key=len)
    return Case(name=name, model_type=model_type, settings=(base or BASES[model_type]) | settings, **more)


CASES = [
    case(
        "qwen2_moe_published",  # the shape of Qwen1.5-MoE-A2.7B: 60 experts, top 4, not renormalised
        seed=8,
        settings={
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 12,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "rope_parameters": rope(1_000_000.0),
        },
        keys="hub",
        hub_extra={"sliding_window": 32768, "max_window_layers": 21},
    ),
    case(
        "qwen2_moe_renormalised_tied_without_bias",
        seed=9,
        settings={"num_experts_per_tok": 3, "norm_topk_prob": True, "qkv_bias": False, "tie_word_embeddings": True},
    ),
    case(
        "qwen2_moe_mlp_only_fused",
        seed=46,
        settings={"num_hidden_layers": 4, "mlp_only_layers": [1], "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        experts="fused",
    ),
    case(
        "qwen2_moe_sparse_step_top1_sharded",
        seed=49,
        settings={
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "num_experts": 3,
            "num_experts_per_tok": 1,
        },
        sharded=True,
    ),
    case(
        "qwen2_moe_window_short",  # even layers below max_window_layers slide, here 0 and 2
        seed=37,
        settings={"num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 3},
        keys="hub",
    ),
    case(
        "qwen2_moe_window_long",
        seed=12,
        settings={"use_sliding_window": True, "sliding_window": 200, "norm_topk_prob": True},
    ),
    case(
        "qwen3_moe_published",  # the shape of Qwen3-30B-A3B
        seed=5,
        settings={"head_dim": 16, "num_key_value_heads": 1, "rope_parameters": rope(1_000_000.0)},
        keys="hub",
        hub_extra={"sliding_window": None, "max_window_layers": 3, "rope_scaling": None},
    ),
    case(
        "qwen3_moe_top1_tied_bias_without_head_dim",
        seed=3,
        settings={
            "num_experts": 3,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-2,
        },
    ),
    case(
        "qwen3_moe_window_of_one_page",
        seed=8,
        settings={"use_sliding_window": True, "sliding_window": 16, "num_experts_per_tok": 4},
    ),
    case(
        "qwen3_moe_window_long_linear_rope",
        seed=24,
        settings={
            "use_sliding_window": True,
            "sliding_window": 77,
            "norm_topk_prob": False,
            "rope_parameters": rope(50_000.0, rope_type="linear", factor=2.5),
        },
        keys="hub",
    ),
    case("qwen3_moe_yarn", seed=13, settings={"head_dim": 16, "rope_parameters": YARN_ROPE}, keys="hub"),
    case(
        "qwen3_moe_sparse_step_fused_sharded",
        seed=9,
        settings={"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "head_dim": 12},
        experts="fused",
        sharded=True,
    ),
    case(
        "qwen3_moe_60_experts_top8_bfloat16",
        seed=22,
        settings={
            "num_hidden_layers": 2,
            "num_experts": 60,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 12,
        },
        dtype="bfloat16",
    ),
    case(
        "gemma4_text_published",  # the shape of Gemma-4-26B-A4B
        seed=20,
        settings={"num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
        keys="hub",
    ),
    case(
        "gemma4_text_eight_layers",  # sliding x 5, full, sliding, full
        seed=63,
        settings={
            "num_hidden_layers": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "top_k_experts": 4,
            "rms_norm_eps": 1e-2,
        },
    ),
    case(
        "gemma4_text_separate_values_untied",  # without k_eq_v the number of global heads is not read
        seed=6,
        settings={"attention_k_eq_v": False, "tie_word_embeddings": False, "sliding_window": 200},
        keys="hub",
        hub_extra={"num_global_key_value_heads": 1},
    ),
    case(
        "gemma4_text_top1_layer_types_sharded",
        seed=5,
        settings={
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 16,
            "num_experts": 3,
            "top_k_experts": 1,
            "num_global_key_value_heads": 4,
            "rope_parameters": gemma4_rope(sliding_theta=500.0, full_theta=2_000.0, partial_rotary_factor=0.5),
        },
        sharded=True,
    ),
    case(
        "gemma4_text_dense",
        seed=52,
        base=GEMMA4,
        settings={"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
        keys="hub",
    ),
    case(
        "gemma4_text_dense_bias_one_head_dim",  # no layer differs from another in its sizes
        seed=36,
        base=GEMMA4,
        settings={"num_hidden_layers": 6, "global_head_dim": 8, "attention_bias": True, "num_key_value_heads": 1},
    ),
    case(
        "gemma4_published",
        seed=20,
        settings={
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 5.0,
            "use_bidirectional_attention": "vision",  # between image tokens only: text stays causal
        },
        keys="hub",
        sharded=True,
    ),
    case("gemma4_dense", seed=36, base=GEMMA4, settings={"num_hidden_layers": 3, "global_head_dim": 24}),
    case(
        "gemma4_with_vision_tower",  # as published: tensors that a text engine passes over
        seed=1,
        settings={
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 7,
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
            },
        },
        keys="hub",
    ),
    case("mixtral_published", settings={"rope_parameters": rope(500_000.0)}, keys="hub"),
    case(
        "mixtral_window_short_sharded",
        settings={"sliding_window": 9, "num_local_experts": 3, "rms_norm_eps": 1e-2},
        keys="hub",
        sharded=True,
    ),
    case(
        "mixtral_top1_tied_head_dim_fused",
        settings={"num_experts_per_tok": 1, "tie_word_embeddings": True, "head_dim": 12, "num_key_value_heads": 1},
        experts="fused",
    ),
    case(
        "mixtral_window_long_top4",
        seed=3,
        settings={"sliding_window": 64, "num_experts_per_tok": 4, "num_key_value_heads": 4},
    ),
    case(
        "mixtral_longrope",  # within its original context; test_longrope has the rest
        seed=1,
        settings={"head_dim": 8, "rope_parameters": LONGROPE},
        keys="hub",
    ),
    case(
        "olmoe_published",  # the shape of OLMoE-1B-7B: not renormalised
        seed=9,
        settings={
            "num_hidden_layers": 2,
            "intermediate_size": 12,
            "num_key_value_heads": 4,
            "num_experts": 60,
            "num_experts_per_tok": 8,
        },
        keys="hub",
        hub_extra={"rope_scaling": None, "clip_qkv": None},
    ),
    case(
        "olmoe_clip_qkv_renormalised",
        seed=1,
        settings={"clip_qkv": 0.6, "norm_topk_prob": True, "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
    ),
    case(
        "olmoe_bias_tied_fused",
        seed=25,
        settings={
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 3,
            "rope_parameters": rope(700.0),
        },
        experts="fused",
        keys="hub",
    ),
    case(
        "llama_published",  # as Llama 2: frequencies among the tensors, no head_dim, no rope keys
        seed=3,
        settings={"num_key_value_heads": 4},
        keys="hub",
        dtype="float16",
        extra_tensors={f"model.layers.{layer_id}.self_attn.rotary_emb.inv_freq": (4,) for layer_id in range(3)},
    ),
    case(
        "llama3_published",
        seed=5,
        settings={
            "num_key_value_heads": 1,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE,
        },
        keys="hub",
    ),
    case(
        "llama_linear_rope_bias_head_dim",
        seed=4,
        settings={
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-2,
            "rope_parameters": rope(3_000.0, rope_type="linear", factor=4.0),
        },
    ),
    case(
        "llama3_sharded",
        settings={"hidden_size": 64, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500.0}},
        sharded=True,
    ),
    case(
        "llama_yarn_mscale",
        seed=4,
        settings={"rope_parameters": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}},
    ),
    case(
        "qwen3_tied",
        seed=12,
        settings={"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": rope(1_000_000.0)},
        keys="hub",
        hub_extra={"sliding_window": None, "max_window_layers": 3},
    ),
    case(
        "qwen3_window_short_bias",  # layers from max_window_layers on slide, here 2 and 3
        settings={
            "num_hidden_layers": 4,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 10,
            "max_window_layers": 2,
        },
        keys="hub",
    ),
    case(
        "qwen3_window_long", seed=1, settings={"use_sliding_window": True, "sliding_window": 90, "max_window_layers": 0}
    ),
    case(
        "qwen3_5_moe_published",  # the shape of Qwen3.6-35B-A3B: images and the draft layer are passed over
        seed=1,
        settings={"vision_config": QWEN3_5_VISION, "rope_parameters": rope(10_000_000.0, partial_rotary_factor=0.25)},
        keys="hub",
        hub_extra={"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"},
        extra_tensors={"mtp.fc.weight": (32, 64), "mtp.layers.0.self_attn.q_norm.weight": (16,)},
    ),
    case(
        "qwen3_5_moe_text_bias_tied_fused_sharded",
        seed=0,
        settings={
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "rope_parameters": rope(3_000.0, partial_rotary_factor=0.5),
        },
        experts="fused",
        sharded=True,
    ),
    case("qwen3_5_published", seed=1, settings={"vision_config": QWEN3_5_VISION}, keys="hub"),
    case(
        "qwen3_5_text_linear_rope_bfloat16",
        seed=1,
        settings={
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "rope_parameters": rope(700.0, rope_type="linear", factor=2.0, partial_rotary_factor=0.25),
        },
        dtype="bfloat16",
    ),
    case("qwen3_next_published", seed=0, settings={"num_experts_per_tok": 3}, keys="hub"),
    case(
        "qwen3_next_mlp_only_not_renormalised",
        seed=8,
        settings={
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "num_experts_per_tok": 1,
        },
    ),
    case(
        "deepseek_v2_published",  # the shape of V2-Lite: queries projected in one step, two shared experts
        seed=0,
        settings={
            "q_lora_rank": None,
            "num_experts_per_tok": 3,
            "rope_parameters": LATENT_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        },
        keys="hub",
        hub_extra={
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "aux_loss_alpha": 0.1,
        },
    ),
    case(
        "deepseek_v2_groups_scaled_tied_fused",
        seed=0,
        settings={
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 0,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        experts="fused",
    ),
    case(
        "deepseek_v3_published",  # with its draft layer, which is passed over
        seed=1,
        settings={
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.5,
            "rope_parameters": LATENT_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
        },
        keys="hub",
        hub_extra={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
        },
        extra_tensors={
            "model.layers.3.eh_proj.weight": (32, 64),
            "model.layers.3.mlp.gate.weight": (6, 32),
        },
    ),
    case(
        "deepseek_v3_halves_not_renormalised_sharded",
        seed=1,
        settings={
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-2,
            "rope_parameters": rope(3_000.0, rope_type="linear", factor=2.0),
        },
        sharded=True,
        dtype="bfloat16",
    ),
    case(
        "gpt_oss_published",  # as gpt-oss-20b: YaRN whose range is not rounded, four experts of many
        seed=1,
        settings={
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "intermediate_size": 12,
            "rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
        keys="hub",
        hub_extra={"swiglu_limit": 7.0, "experts_per_token": 4, "initial_context_length": 4096},
    ),
    case(
        "gpt_oss_without_bias_sharded",
        seed=0,
        settings={
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "attention_bias": False,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": rope(700.0),
        },
        sharded=True,
        dtype="bfloat16",
    ),
    case(
        "glm4_moe_lite_published",  # the shape of GLM-4.7-Flash: 20 heads, values wider than keys
        seed=0,
        settings={"num_attention_heads": 20, "num_key_value_heads": 20, "rope_parameters": rope(1_000_000.0)},
        keys="hub",
        hub_extra={"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "first_k_dense_replace": 1},
    ),
    case(
        "glm4_moe_lite_layer_types_bias_fused",
        seed=8,
        settings={
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "v_head_dim": 6,
            "tie_word_embeddings": True,
        },
        experts="fused",
    ),
    case(
        "glm4_moe_published",  # the shape of GLM-4.5: a draft layer follows the last, which is passed over
        settings={
            "attention_bias": True,
            "use_qk_norm": True,
            "head_dim": 16,
            "rope_parameters": rope(1_000_000.0, partial_rotary_factor=0.5),
        },
        keys="hub",
        hub_extra={"num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1},
        extra_tensors={"model.layers.3.eh_proj.weight": (32, 64), "model.layers.3.enorm.weight": (32,)},
    ),
    case(
        "glm4_moe_not_renormalised_two_shared_fused_sharded",
        settings={
            "num_hidden_layers": 4,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_experts_per_tok": 3,
            "num_key_value_heads": 1,
            "rope_parameters": rope(3_000.0, partial_rotary_factor=0.25),
        },
        experts="fused",
        sharded=True,
    ),
    case("glm4_moe_experts_everywhere_tied", settings={"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    case(
        "minimax_m2_published",  # transformers 5.17 reads no rotary_dim
        settings={"rope_parameters": rope(5_000_000.0, partial_rotary_factor=0.5)},
        keys="hub",
        hub_extra={
            "rotary_dim": 8,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "attn_type_list": [1, 1, 1],
        },
    ),
    case(
        "minimax_m2_all_dimensions_turn_fused_sharded",
        settings={"num_experts_per_tok": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        experts="fused",
        sharded=True,
    ),
    case(
        "ernie4_5_moe_published",  # the shape of ERNIE-4.5-21B-A3B: its draft layer is passed over
        settings={"head_dim": 16, "tie_word_embeddings": True, "rope_parameters": rope(500_000.0)},
        keys="hub",
        hub_extra={"moe_use_aux_free": True},
        extra_tensors={
            "model.mtp_block.0.self_attn.q_proj.weight": (64, 32),
            "model.mtp_linear_proj.0.weight": (32, 64),
        },
    ),
    case(
        "ernie4_5_moe_some_layers_without_shared_fused_sharded",
        seed=3,
        settings={
            "num_hidden_layers": 5,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "moe_k": 3,
            "num_key_value_heads": 1,
        },
        experts="fused",
        sharded=True,
    ),
]


def save(case: Case, folder: Path) -> Path:
    """Write the checkpoint of `case` into `folder`. The weights depend on the settings and the seed alone."""
    model = build(case)
    model.to(getattr(torch, case.dtype)).save_pretrained(
        folder,
        max_shard_size="40KB" if case.sharded else "1GB",
        save_original_format=case.experts == "split",
    )
    if case.extra_tensors:
        add_tensors(folder, case.extra_tensors)
    if case.keys == "hub":
        write_hub_keys(folder, case.hub_extra)
    return folder


def build(case: Case) -> transformers.PreTrainedModel:
    config_class, model_class = ARCHITECTURES[case.model_type]
    settings = dict(case.settings)
    if case.model_type in TEXT_CONFIGS:
        vision_config = settings.pop("vision_config", None)
        text_config = TEXT_CONFIGS[case.model_type](**settings)
        config = config_class(text_config=text_config, vision_config=vision_config)
    else:
        config = config_class(**settings)
    model = model_class(config).eval()
    randomise(model, case.seed)
    return model


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Move every tensor away from the 0 or 1 it starts with: a factor left out must show."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.state_dict().items()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if is_factor(name):
            low, high = (0.2, 0.6) if isinstance(model, GEMMA4_CLASSES) and "q_norm" in name else (0.5, 1.5)
            if isinstance(model, FROM_ONE) and "linear_attn.norm" not in name:
                low, high = low - 1, high - 1
            tensor.uniform_(low, high, generator=generator)
        elif tensor.is_floating_point():
            tensor.normal_(0.0, spread(name, tensor), generator=generator)


# Gemma 4 does not divide attention scores: with queries near 1 they would be so sharp as to magnify rounding.
GEMMA4_CLASSES = (transformers.Gemma4ForCausalLM, transformers.Gemma4ForConditionalGeneration)


# Weights of their norms are kept less 1, but for the norm in a delta net.
FROM_ONE = tuple(ARCHITECTURES[name][1] for name in ARCHITECTURES if name.startswith(("qwen3_5", "qwen3_next")))


def is_factor(name: str) -> bool:
    return "norm" in name or name.endswith(("layer_scalar", "per_expert_scale", "router.scale"))


def spread(name: str, tensor: torch.Tensor) -> float:
    """Standard deviations that keep the residual stream, the attention scores and the router logits near 1."""
    if name.endswith("sinks"):
        return 1.0
    if name.endswith("router.proj.weight"):
        return 1.0  # its input is multiplied by hidden_size ** -0.5
    if name.endswith("gate_up_proj_bias"):
        return 3.0  # so that some values are clamped
    if name.endswith(("embed_tokens.weight", "shared_expert_gate.weight", "mlp.gate.weight", "bias")):
        return 0.3
    return 1.1 * tensor.shape[-1] ** -0.5


def add_tensors(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: torch.ones(shape) for name, shape in shapes.items()}, path, metadata={"format": "pt"})


def write_hub_keys(folder: Path, extra: dict[str, Any]) -> None:
    """Rewrite config.json from the keys transformers 5 saves to those of the published files of the same family."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text_config = config.get("text_config", config)
    if text_config["model_type"] == "gemma4_text":
        to_hub_gemma4(text_config)
    elif text_config is not config:
        text_config["full_attention_interval"] = 4
    else:
        to_hub_flat(config)
    text_config.update(extra)
    path.write_text(json.dumps(config, indent=2))


def to_hub_gemma4(config: dict[str, Any]) -> None:
    """Gemma 4 is published with `layer_types`, `dtype` and `rope_parameters`, and names its global sizes."""
    full_layers = [layer_id for layer_id, kind in enumerate(config["layer_types"]) if kind == "full_attention"]
    overrides = config.pop("per_layer_config", {}).get(str(full_layers[0]), {})
    config["global_head_dim"] = overrides.get("head_dim", config["head_dim"])
    config["num_global_key_value_heads"] = overrides.get("num_key_value_heads")


def to_hub_flat(config: dict[str, Any]) -> None:
    parameters = config.pop("rope_parameters")
    config["rope_theta"] = parameters.pop("rope_theta")
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters.pop("partial_rotary_factor")
    if parameters["rope_type"] == "linear":
        config["rope_scaling"] = {"type": "linear", "factor": parameters["factor"]}  # "type": spelt so before llama3
    elif parameters["rope_type"] != "default":
        config["rope_scaling"] = parameters
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe" and "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config.pop("layer_types", None)


def prompt(case: Case) -> list[int]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    return torch.randint(0, VOCAB_SIZE, (PROMPT_LENGTH,), generator=generator).tolist()


class Judge:
    """A checkpoint folder as transformers understands it: float32, its most literal attention and experts."""

    def __init__(self, folder: Path, model_type: str) -> None:
        _, model_class = ARCHITECTURES[model_type]
        self.model = model_class.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        # Whatever the checkpoint says of sampling, padding and stopping is put aside.
        self.model.generation_config = transformers.GenerationConfig(
            max_new_tokens=NUM_NEW_TOKENS, do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0
        )

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits [len(token_ids), vocab] of one pass without a cache."""
        return self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()

    @torch.no_grad()
    def greedy(self, prompt_ids: list[int]) -> list[int]:
        """The `NUM_NEW_TOKENS` tokens that transformers' own `generate` appends."""
        input_ids = torch.tensor([prompt_ids])
        # The mask is given, or `generate` would take every token equal to the pad token for padding.
        output = self.model.generate(input_ids, attention_mask=torch.ones_like(input_ids))
        new_tokens = output[0, len(prompt_ids) :].tolist()
        assert len(new_tokens) == NUM_NEW_TOKENS
        return new_tokens


def smallest_lead(logits: torch.Tensor) -> float:
    """How far the best token is ahead of the second best, where it is least."""
    best_two = logits.topk(2, dim=-1).values
    return (best_two[:, 0] - best_two[:, 1]).min().item()
