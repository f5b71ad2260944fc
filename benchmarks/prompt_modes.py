"""What a step of one prompt costs by --graphs: start, TTFT, launches, memory of graphs, and whether it recompiles.

    PYTHONPATH=src python3 benchmarks/prompt_modes.py qwen1.5-moe-a2.7b compiled --json FILE
    PYTHONPATH=src python benchmarks/prompt_modes.py path/to/model none --lengths 8 16 --random 20    without a GPU

One mode a process, since a start is part of it; the line it prints is added to FILE. Caches are as they are found: run
it twice to see a start with compiled pieces on disk. A model is a config that comes with `bench offline`, with random
weights, or a folder.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from torch import profiler

from anabranch.bench.records import bundled, commit
from anabranch.config import CHOICES
from anabranch.llm import LLM, SamplingParams

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cuGraphLaunch")


def num_traced() -> int:
    """Graphs that torch.compile has made so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def graph_memory() -> int:
    """Bytes that the allocator holds for captured graphs: pools other than everyone's."""
    segments = torch.cuda.memory_snapshot() if torch.cuda.is_available() else []
    return sum(one["total_size"] for one in segments if tuple(one["segment_pool_id"]) != (0, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("graphs", choices=CHOICES["graphs"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 4096], metavar="N")
    parser.add_argument("--random", type=int, default=200, metavar="N", help="prompts of random length")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    is_folder, rng = Path(options.model).is_dir(), random.Random(0)
    begin = time.perf_counter()
    with LLM(
        options.model if is_folder else bundled(options.model, "dummy"),
        load_format="safetensors" if is_folder else "dummy",
        max_model_len=2 * max(options.lengths),
        prefix_cache=False,
        show_progress=False,
        graphs=options.graphs,
    ) as llm:
        started = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

        def prompt(length: int) -> float:
            ids = [rng.randrange(llm.engine.model.vocab_size) for _ in range(length)]
            asked = time.perf_counter()
            llm.generate([ids], params)
            return 1e3 * (time.perf_counter() - asked)

        ttft_ms = {}
        for length in options.lengths:
            prompt(length)
            ttft_ms[length] = round(statistics.median(prompt(length) for _ in range(5)), 2)
        middle = options.lengths[len(options.lengths) // 2]
        with profiler.profile(activities=profiler.supported_activities()) as seen:
            prompt(middle)
        launches = Counter(event.name for event in seen.events() if event.name.startswith(LAUNCHES))
        before = num_traced()
        for _ in range(options.random):
            prompt(rng.randrange(1, max(options.lengths)))
        row = {
            "model": options.model,
            "graphs": options.graphs,
            "commit": commit(),
            "torch": torch.__version__,
            "start_s": round(started - begin, 1),
            "ttft_ms": ttft_ms,
            "graph_memory_bytes": graph_memory(),
            f"launches_{middle}": dict(launches),
            "graphs_before": before,
            "graphs_after": num_traced(),
        }
    print(json.dumps(row))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
