"""What states of gated delta nets in the model's dtype cost in precision, against states in fp32.

    python benchmarks/state_error.py qwen3.6-35b-a3b --json FILE
    python benchmarks/state_error.py FOLDER --tokens 64 --every 16             without a GPU

A model is a config that comes with `bench offline`, with random weights, or a folder. The same tokens (random, or ids
in a JSON file), one a step, so that a state is rounded after each, as in decoding; with --chunk, several a step. Of the
tokens up to each mark: the relative error of their logits, the mean KL divergence in nats and the share of equal best
tokens; and the relative error of the states at the mark, of the layer where it is largest. For comparison, the same
against a model whose steps have twice the tokens, with fp32 states: what the order of sums changes.
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
from anabranch.models.decoder import Decoder


class Follower:
    """The sequence, with states in a dtype. All share the model: only what they keep differs."""

    def __init__(self, model: Decoder, num_tokens: int, chunk: int, state_dtype: torch.dtype) -> None:
        self.sequence, self.chunk = SingleSequence(model, num_tokens), chunk
        groups = model.config.cache_groups
        self.states = [i for group in groups if not group.policy.per_token for i in group.layers]
        for layer in self.states:
            conv_PLC, state_PHKV = self.sequence.kv[layer]
            self.sequence.kv[layer] = conv_PLC, state_PHKV.to(state_dtype)

    def run(self, tokens: list[int]) -> torch.Tensor:
        parts = [tokens[begin : begin + self.chunk] for begin in range(0, len(tokens), self.chunk)]
        return torch.cat([self.sequence.forward(part) for part in parts])

    def state(self, layer: int) -> torch.Tensor:
        """The request's page alone."""
        group = next(i for i, g in enumerate(self.sequence.model.config.cache_groups) if layer in g.layers)
        return self.sequence.kv[layer][1][self.sequence.pages[group][0]].double()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


def compare(logits_TV: torch.Tensor, exact_TV: torch.Tensor) -> dict[str, float]:
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (exact_TV, logits_TV))
    return {
        "logits": error(logits_TV, exact_TV),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same_best": float((logits_TV.argmax(-1) == exact_TV.argmax(-1)).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N")
    parser.add_argument("--every", type=int, default=512, metavar="N", help="a mark after so many tokens")
    parser.add_argument("--chunk", type=int, default=1, metavar="N", help="tokens of a step (default 1)")
    parser.add_argument("--ids", type=Path, metavar="FILE", help="a JSON list of token ids (default: random)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    is_folder = Path(options.model).is_dir()
    folder = options.model if is_folder else bundled(options.model, "dummy")

    model = load_model(folder, dtype=options.dtype, load_format="safetensors" if is_folder else "dummy")
    vocabulary, rng = model.config.vocab_size, random.Random(0)
    tokens = [rng.randrange(vocabulary) for _ in range(options.tokens)]
    if options.ids is not None:
        tokens = json.loads(options.ids.read_text())[: options.tokens]
    runs = {
        "fp32": Follower(model, len(tokens), options.chunk, torch.float32),
        "model": Follower(model, len(tokens), options.chunk, model.embed_tokens.weight.dtype),
        "other sums": Follower(model, len(tokens), 2 * options.chunk, torch.float32),
    }
    if not runs["fp32"].states:
        parser.error(f"{options.model} has no layers with states")
    rows: list[dict[str, Any]] = []
    print(f"{'tokens':>7} {'states':>12} {'logits':>9} {'KL':>10} {'same best':>10} {'state':>9}")
    for begin in range(0, len(tokens), options.every):
        part = tokens[begin : begin + options.every]
        logits = {name: run.run(part) for name, run in runs.items()}
        for name in ("model", "other sums"):
            found: dict[str, Any] = compare(logits[name], logits["fp32"])
            found["state"] = max(error(runs[name].state(i), runs["fp32"].state(i)) for i in runs[name].states)
            rows.append({"tokens": begin + len(part), "states": name} | found)
            cells = f"{found['logits']:9.2e} {found['kl']:10.2e} {found['same_best']:10.2%} {found['state']:9.2e}"
            print(f"{begin + len(part):7} {name:>12} {cells}", flush=True)
    if options.json is not None:
        about = {"model": options.model, "commit": commit(), "dtype": options.dtype, "chunk": options.chunk}
        options.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
