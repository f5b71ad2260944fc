"""The offline workloads that engines are compared by: time to first token, decode at several batch sizes, throughput.

Token-id prompts, each distinct, uniform in [1000, 100000) from random.Random(0); greedy, no end-of-text, nothing
detokenised, prefix cache off. TTFT: one request, one token, median of 5. Decode at batch B: prompts of 128 tokens,
(best of 2 full runs − best of 2 one-token runs) / (N − 1). Throughput: 512 requests handed over at once.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch import __version__
from anabranch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from anabranch.llm import LLM

PROMPT_LENGTHS = (128, 1024, 4096, 8192)
BATCHES = (1, 4, 16, 64, 128, 256)
THROUGHPUT = {"thr_1024_128": (512, 1024, 128), "thr_256_256": (512, 256, 256)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id; with dummy weights config.json is enough")
    parser.add_argument("--load-format", default="safetensors", choices=["safetensors", "dummy"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    parser.add_argument("--max-model-len", type=int, default=16384, metavar="N", help="default 16384")
    parser.add_argument("--memory-fraction", type=float, default=0.85, metavar="F", help="default 0.85")
    parser.add_argument("--only", default="ttft,decode,throughput", metavar="KINDS", help="ttft, decode, throughput")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, after each one")


class Bench:
    def __init__(self, llm: LLM, result: dict[str, Any], json_file: str | None) -> None:
        self.llm = llm
        self.result = result
        self.json_file = json_file
        self.random = random.Random(0)
        self.vocabulary = llm.engine.model.vocab_size

    def prompts(self, count: int, length: int) -> list[list[int]]:
        low, high = (1000, 100_000) if self.vocabulary >= 100_000 else (0, self.vocabulary)
        return [[self.random.randrange(low, high) for _ in range(length)] for _ in range(count)]

    def seconds(self, count: int, length: int, num_tokens: int) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        prompts = self.prompts(count, length)
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params)  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        assert all(len(output.token_ids) == num_tokens for output in outputs)
        return seconds

    def save(self) -> None:
        if self.json_file:
            Path(self.json_file).write_text(json.dumps(self.result, indent=1))

    def ttft(self) -> None:
        found = self.result.setdefault("ttft_ms", {})
        for length in PROMPT_LENGTHS:
            if length + 8 > self.llm.engine.config.max_model_len:
                continue
            self.seconds(1, length, 1)
            found[str(length)] = 1e3 * statistics.median(self.seconds(1, length, 1) for _ in range(5))
            self.show(f"ttft {length}", f"{found[str(length)]:.2f} ms")

    def decode(self) -> None:
        found = self.result.setdefault("decode_ms", {})
        for batch in BATCHES:
            num_tokens = 129 if batch <= 64 else 65
            self.seconds(batch, 128, 2)
            one = min(self.seconds(batch, 128, 1) for _ in range(2))
            full = min(self.seconds(batch, 128, num_tokens) for _ in range(2))
            found[str(batch)] = 1e3 * (full - one) / (num_tokens - 1)
            self.show(f"decode {batch}", f"{found[str(batch)]:.3f} ms")

    def throughput(self) -> None:
        for name, (count, length, num_tokens) in THROUGHPUT.items():
            seconds = self.seconds(count, length, num_tokens)
            self.result[name] = {
                "s": seconds,
                "out_tok_s": count * num_tokens / seconds,
                "total_tok_s": count * (length + num_tokens) / seconds,
            }
            self.show(name, f"{self.result[name]['total_tok_s']:.0f} tok/s, {self.result[name]['out_tok_s']:.0f} out")

    def show(self, name: str, figure: str) -> None:
        print(f"{name:>16}  {figure}", flush=True)
        self.save()


def run(options: argparse.Namespace) -> int:
    kinds = [kind.strip() for kind in options.only.split(",")]
    for kind in kinds:
        if kind not in ("ttft", "decode", "throughput"):
            raise ValueError(f"--only: {kind!r} is none of ttft, decode, throughput")
    started = time.perf_counter()
    import torch  # noqa: F401  the bulk of the import time

    from anabranch.llm import LLM
    from anabranch.models.config import read_config

    imported = time.perf_counter()
    folder = options.model
    limit = read_config(folder).max_position if Path(folder).is_dir() else options.max_model_len
    llm = LLM(
        folder,
        load_format=options.load_format,
        dtype=options.dtype,
        max_model_len=min(options.max_model_len, limit),
        memory_fraction=options.memory_fraction,
        prefix_cache=False,
        show_progress=False,
    )
    result: dict[str, Any] = {
        "engine": "anabranch",
        "model": Path(folder).name,
        "version": __version__,
        "commit": commit(),
        "machine": llm.engine.runner.platform.describe(),
        "import_s": imported - started,
        "startup_s": time.perf_counter() - imported,
    }
    bench = Bench(llm, result, options.json)
    bench.show("start-up", f"{result['import_s']:.1f} + {result['startup_s']:.1f} s")
    bench.seconds(8, 128, 16)
    bench.seconds(1, min(1024, llm.engine.config.max_model_len - 8), 4)
    for kind in kinds:
        getattr(bench, kind)()
    llm.close()
    return 0


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
