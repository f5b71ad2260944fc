"""Speed on a CPU, of decode and of prompts: this checkout beside another one and transformers, in turns, in one run.

    python benchmarks/cpu_decode.py [--model FOLDER] [--against CHECKOUT] [--streams 1 16] [--tokens N] [--runs N]
                                    [--prompts 128 1024]

Each side is a process of its own with the same threads, fp32, greedy, prompts of 32 tokens. Only one works at a time,
and they take turns, so that other work on the machine slows all of them. A run is timed twice, with few and with many
tokens: the difference is decode alone. tok/s of wall time, the best and the median of the runs, and the CPU time of a
step, which other work disturbs less. `--prompts`: seconds to the first token of prompts of so many tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPT, FEW = 32, 4


def prompts(streams: int, length: int) -> list[list[int]]:
    return [[(7 * i + j) % 4000 + 3 for j in range(length)] for i in range(streams)]


def serve(side: str, model: str) -> None:
    """Answer lines [streams, tokens, tokens of a prompt] with [wall seconds, CPU seconds]."""
    if side == "transformers":
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

        def run(streams: int, tokens: int, length: int) -> None:
            ids = torch.tensor(prompts(streams, length))
            with torch.inference_mode():
                options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
                theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    else:
        from anabranch.llm import LLM, SamplingParams

        llm = LLM(model, dtype="float32", max_num_seqs=64, prefix_cache=False, num_pages=2048)

        def run(streams: int, tokens: int, length: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
            llm.generate(prompts(streams, length), [params] * streams)

    for line in sys.stdin:
        begin = time.perf_counter(), time.process_time()
        run(*json.loads(line))
        print(json.dumps([time.perf_counter() - begin[0], time.process_time() - begin[1]]), flush=True)


class Side:
    def __init__(self, name: str, source: Path, model: str) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--side", name, "--model", model]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def run(self, streams: int, tokens: int, length: int = PROMPT) -> list[float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([streams, tokens, length]), file=self.process.stdin, flush=True)
        seconds: list[float] = json.loads(self.process.stdout.readline())
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "src/anabranch/bundled/demo"), metavar="FOLDER")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of Anabranch")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16], metavar="N")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="steps that are timed (default 64)")
    parser.add_argument("--prompts", type=int, nargs="+", default=[], metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return serve(options.side, options.model)
    sides = [Side("this", ROOT / "src", options.model), Side("transformers", ROOT / "src", options.model)]
    if options.against:
        sides.insert(1, Side("other", options.against.resolve() / "src", options.model))
    result: dict[str, Any] = {"model": Path(options.model).name, "tokens": options.tokens, "runs": options.runs}
    for streams in options.streams:
        runs: dict[str, list[tuple[list[float], list[float]]]] = {side.name: [] for side in sides}
        for turn in range(options.runs + 1):
            for side in sides:
                few, many = side.run(streams, FEW), side.run(streams, FEW + options.tokens)
                if turn:  # the first is a warm-up
                    runs[side.name].append((few, many))
        for name, timed in runs.items():
            few_wall, many_wall, few_cpu, many_cpu = ([pair[i][k] for pair in timed] for k in (0, 1) for i in (0, 1))
            work = streams * options.tokens
            found = {"best_tok_s": work / (min(many_wall) - min(few_wall))}
            found["median_tok_s"] = work / (statistics.median(many_wall) - statistics.median(few_wall))
            cpu = statistics.median(many_cpu) - statistics.median(few_cpu)
            found["cpu_ms_per_step"] = 1e3 * cpu / options.tokens
            result[f"{name} {streams}"] = found
            print(
                f"{streams:3} streams, {name:12}: best {found['best_tok_s']:8.1f} tok/s, median "
                f"{found['median_tok_s']:8.1f}, CPU {found['cpu_ms_per_step']:7.2f} ms a step",
                flush=True,
            )
    for length in options.prompts:
        seconds: dict[str, list[float]] = {side.name: [] for side in sides}
        for turn in range(options.runs + 1):
            for side in sides:
                wall, _ = side.run(1, 1, length)
                if turn:
                    seconds[side.name].append(wall)
        for name, each in seconds.items():
            result[f"{name} prompt {length}"] = {"best_s": min(each), "median_s": statistics.median(each)}
            times = f"first token after {min(each):.3f} s, median {statistics.median(each):.3f}"
            print(f"prompt of {length} tokens, {name:12}: {times}", flush=True)
    for side in sides:
        side.process.terminate()
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
        options.json.write_text(json.dumps(result | {"commit": commit.stdout.strip()}, indent=1))


if __name__ == "__main__":
    main()
