"""Write a tiny random qwen2_moe checkpoint with a byte-level tokenizer: a model for tests.

    python tools/tiny_model.py FOLDER [--seed N]

Its text is noise; it shows that everything from config to kernel works on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from anabranch.loader.load import build
from anabranch.loader.names import parameter_layouts, stored
from anabranch.models.config import read_config

CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "vocab_size": 257,
    "eos_token_id": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 12,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, and one that ends a text: any text goes in, any token comes out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_weights(folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = build(read_config(folder), torch.float32)
    tensors = {}
    layouts = (stored(target, layouts) for _, target, layouts in parameter_layouts(model))
    for name, shape in itertools.chain.from_iterable(layouts):
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if "norm" in name else 0.2 * noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write(folder: Path, seed: int = 0, config: dict[str, object] = CONFIG) -> None:
    """All of it or nothing: the folder appears when it is complete."""
    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    (part / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(part)
    write_weights(part, seed)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.folder, options.seed)


if __name__ == "__main__":
    main()
