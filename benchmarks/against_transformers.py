"""Anabranch against Hugging Face transformers on the same CPU, in one process, same threads, fp32, same model.

    python benchmarks/against_transformers.py [--model FOLDER] [--concurrent N] [--longest N] [--json FILE]

A random qwen2_moe of about 10M parameters, or the model of a folder. Prompts of 16-256 and answers of 16-256 tokens,
drawn with seed 0. Single stream: one request after another against `generate`. 32 concurrent: all at once against
`generate` on one left-padded batch, which runs until its longest answer is done; only tokens that were asked for count,
on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from anabranch.llm import LLM, SamplingParams

NUM_SINGLE = 8


def make_model(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.Qwen2MoeConfig(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=512,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=256,
        num_experts=12,
        num_experts_per_tok=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(config)
    model.save_pretrained(folder)
    return transformers.Qwen2MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def workload(count: int, longest: int) -> list[tuple[list[int], int]]:
    rng = random.Random(0)
    lengths = partial(rng.randint, 16, longest)
    return [([rng.randrange(4096) for _ in range(lengths())], lengths()) for _ in range(count)]


def theirs(model: transformers.PreTrainedModel, batch: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    """Seconds and answers of one padded batch."""
    longest, answer = max(len(prompt) for prompt, _ in batch), max(n for _, n in batch)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=answer,
            min_new_tokens=answer,
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - started
    return seconds, [row[longest : longest + n].tolist() for row, (_, n) in zip(out, batch, strict=True)]


def ours(llm: LLM, batch: list[tuple[list[int], int]]) -> tuple[float, list[list[int]]]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in batch]
    started = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in batch], params)
    return time.perf_counter() - started, [output.token_ids for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="instead of the random one")
    parser.add_argument("--concurrent", type=int, default=32, metavar="N", help="requests at once (default 32)")
    parser.add_argument(
        "--longest", type=int, default=256, metavar="N", help="tokens of a prompt and an answer (default 256)"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as made:
        folder = str(options.model or made)
        if options.model is None:
            model = make_model(Path(made))
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        llm = LLM(folder, dtype="float32", max_num_seqs=options.concurrent, prefix_cache=False, num_pages=2048)
        num_parameters = sum(p.numel() for p in model.parameters())
        print(f"{num_parameters / 1e6:.1f}M parameters, {torch.get_num_threads()} threads, torch {torch.__version__}")
        requests = workload(options.concurrent, options.longest)
        ours(llm, requests[:2]), theirs(model, requests[:2])  # warm up

        result: dict[str, object] = {"parameters": num_parameters, "threads": torch.get_num_threads()}
        single = requests[:NUM_SINGLE]
        for name, groups in (("single", [[one] for one in single]), ("concurrent", [requests])):
            tokens = sum(n for group in groups for _, n in group)
            mine = [ours(llm, group) for group in groups]
            other = [theirs(model, group) for group in groups]
            pairs = [pair for (_, a), (_, b) in zip(mine, other, strict=True) for pair in zip(a, b, strict=True)]
            equal = sum(a == b for a, b in pairs)
            rates = tokens / sum(s for s, _ in mine), tokens / sum(s for s, _ in other)
            result[name] = {"anabranch_tok_s": rates[0], "transformers_tok_s": rates[1], "ratio": rates[0] / rates[1]}
            print(
                f"{name:>11}: {rates[0]:8.1f} tok/s, transformers {rates[1]:8.1f} tok/s, "
                f"ratio {rates[0] / rates[1]:.2f}; {equal} of {len(pairs)} answers equal"
            )
        if options.json:
            commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
            result |= {"commit": commit.strip(), "concurrent_requests": options.concurrent, "longest": options.longest}
            result |= {"command": "python benchmarks/against_transformers.py", "model": model.config.model_type}
            result |= {"torch": torch.__version__, "transformers": transformers.__version__}
            options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
