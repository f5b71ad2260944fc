"""How evenly random prompts go to the experts of each layer: what a checkpoint's weights make of the router.

    python benchmarks/expert_skew.py FOLDER --json FILE
    python benchmarks/expert_skew.py FOLDER --load-format dummy --tokens 256 --prompts 8

For each length, of the pairs of a token and an expert it visits, per MoE layer: the share of the busiest expert, how
many experts get half of all pairs, the largest number, and the tiles of 128 rows that the experts' kernels multiply.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

from anabranch.bench.records import bundled, commit
from anabranch.engine.single import SingleSequence
from anabranch.loader.load import load_model
from anabranch.moe.layer import RoutedExperts

TILE = 128


def measure(expert_TK: torch.Tensor, num_experts: int) -> dict[str, Any]:
    count_E = torch.bincount(expert_TK.flatten(), minlength=num_experts).sort(descending=True).values
    num_pairs = int(count_E.sum())
    return {
        "busiest": float(count_E[0] / num_pairs),
        "experts_with_half": int((count_E.cumsum(0) < num_pairs / 2).sum()) + 1,
        "largest": int(count_E[0]),
        "tiles": int(((count_E + TILE - 1) // TILE).sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or with dummy weights a config that comes with `bench offline`")
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096], metavar="N")
    parser.add_argument("--prompts", type=int, default=1, metavar="N", help="counted together (default 1)")
    parser.add_argument("--load-format", choices=["safetensors", "dummy"], default="safetensors")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    folder = options.model if Path(options.model).is_dir() else bundled(options.model, options.load_format)
    model = load_model(folder, dtype=options.dtype, load_format=options.load_format)
    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    chosen: list[torch.Tensor] = []
    for layer in layers:
        layer.on_route = chosen.append
    rows = []
    print(f"{'tokens':>7} {'layer':>6} {'busiest':>8} {'half in':>8} {'largest':>8} {'tiles':>6}")
    for num_tokens in options.tokens:
        chosen.clear()
        for number in range(options.prompts):
            rng = random.Random(number)
            tokens = [rng.randrange(model.config.vocab_size) for _ in range(num_tokens)]
            SingleSequence(model, num_tokens).forward(tokens, all_logits=False)
        for index, layer in enumerate(layers):
            found = measure(torch.cat(chosen[index :: len(layers)]), layer.router.weight.shape[0])
            rows.append({"tokens": num_tokens, "layer": index} | found)
            cells = f"{found['busiest']:8.1%} {found['experts_with_half']:8} {found['largest']:8} {found['tiles']:6}"
            print(f"{num_tokens:7} {index:6} {cells}", flush=True)
    if options.json is not None:
        about = {"model": options.model, "commit": commit(), "load_format": options.load_format}
        options.json.write_text(json.dumps(about | {"prompts": options.prompts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
