"""Time to first token with the prefix cache: of new prompts, of the same again, and of prompts with another end.

    PYTHONPATH=src python3 benchmarks/prefix_reuse.py qwen3.6-35b-a3b --json FILE
    PYTHONPATH=src python benchmarks/prefix_reuse.py path/to/model --lengths 64 --prompts 3    without a GPU

A model is a config that comes with `bench offline`, with random weights, or a folder. With --no-prefix-cache the same
prompts without it: what a new prompt pays for checkpoints of states is the difference.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from anabranch.bench.records import bundled, commit
from anabranch.llm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 4096], metavar="N")
    parser.add_argument("--prompts", type=int, default=11, metavar="N", help="of each length")
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    is_folder, rng = Path(options.model).is_dir(), random.Random(0)
    with LLM(
        options.model if is_folder else bundled(options.model, "dummy"),
        load_format="safetensors" if is_folder else "dummy",
        max_model_len=2 * max(options.lengths),
        prefix_cache=options.prefix_cache,
        show_progress=False,
        max_num_seqs=64,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

        def draw(length: int) -> list[int]:
            return [rng.randrange(llm.engine.model.vocab_size) for _ in range(length)]

        def ask(ids: list[int]) -> float:
            asked = time.perf_counter()
            llm.generate([ids], params)
            return 1e3 * (time.perf_counter() - asked)

        rows = {}
        for length in options.lengths:
            for _ in range(3):  # kernels and graphs of this length
                ask(draw(length))
            times: dict[str, list[float]] = {"new": [], "again": [], "parts": [], "another end": []}
            before = llm.engine.stats()
            for _ in range(options.prompts):
                prompt = draw(length)
                stem = prompt[: length * 3 // 4]
                times["new"].append(ask(prompt))
                times["again"].append(ask(prompt))
                times["parts"].append(ask(stem + draw(length - len(stem))))
                times["another end"].append(ask(stem + draw(length - len(stem))))
            after = llm.engine.stats()
            queries, hits = (after[name] - before[name] for name in ("prefix_queries", "prefix_hits"))
            rows[length] = {name: round(statistics.median(some), 2) for name, some in times.items()}
            rows[length]["hit_rate"] = round(hits / queries, 3) if queries else 0.0
        row = {"model": options.model, "commit": commit(), "prefix_cache": options.prefix_cache, "ttft_ms": rows}
    print(json.dumps(row))
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
