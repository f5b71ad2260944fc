"""What quantising weights and the KV cache costs in quality: mean loss of a model on text.

    python benchmarks/perplexity.py MODEL --text README.md docs/serving.md
    python benchmarks/perplexity.py MODEL --samples 40          text that the model itself samples, at temperature 1
    python benchmarks/perplexity.py MODEL --samples 40 --quantizations none none+kv8

A quantisation is one of --quantization of `anabranch serve`; +kv8 adds --kv-cache-dtype fp8_e4m3.

On its own samples, the difference of two losses is the divergence of the two distributions. CPU, fp32.
"""

import argparse
import json
import math
from pathlib import Path

import torch

from anabranch.engine.single import SingleSequence
from anabranch.llm import LLM, SamplingParams
from anabranch.loader.load import load_model
from anabranch.loader.locate import locate
from anabranch.text.tokenizer import Tokenizer

LENGTH = 512
"""Tokens of a piece of text; each is read on its own."""


def sampled(model: str, count: int) -> list[list[int]]:
    """Token ids of `count` samples, with different seeds."""
    with LLM(model) as llm:
        params = [SamplingParams(temperature=1.0, max_tokens=LENGTH - 32, seed=seed) for seed in range(count)]
        answers = llm.generate(["Once upon a time"] * count, params)
        return [[*answer.prompt_ids, *answer.token_ids] for answer in answers]


def loss(model: str, quantization: str, pieces: list[list[int]]) -> tuple[float, int]:
    """(mean nats a token, tokens)"""
    weights, _, cache = quantization.partition("+")
    kv_cache_dtype = {"": "auto", "kv8": "fp8_e4m3"}[cache]
    loaded = load_model(model, dtype="float32", quantization=weights, kv_cache_dtype=kv_cache_dtype)
    total, count = 0.0, 0
    for piece in pieces:
        with torch.inference_mode():
            logits = SingleSequence(loaded, LENGTH).forward(piece)
        total += torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(piece[1:]), reduction="sum").item()
        count += len(piece) - 1
    return total / count, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, nargs="+", default=[])
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--quantizations", nargs="+", default=["none", "fp8", "int4", "none+kv8", "fp8+kv8"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    folder = locate(options.model, weights=True)
    pieces = sampled(options.model, options.samples) if options.samples else []
    if options.text:
        ids = Tokenizer(folder).encode("\n".join(path.read_text() for path in options.text))
        pieces += [ids[begin : begin + LENGTH] for begin in range(0, len(ids) - 1, LENGTH)]
    results = {}
    for quantization in options.quantizations:
        nats, count = loss(str(folder), quantization, [piece for piece in pieces if len(piece) > 1])
        results[quantization] = {"loss": nats, "perplexity": math.exp(nats), "tokens": count}
        print(
            f"{quantization:>9}  {nats:.4f} nats a token, perplexity {math.exp(nats):.3f}, {count} tokens", flush=True
        )
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, **results}, indent=1))


if __name__ == "__main__":
    main()
