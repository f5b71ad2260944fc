"""Steps as large as the largest that are captured, by one rank and by two, in a process of its own:
`python -m tests.parallel.largest FOLDER GRAPHS EXPERT_PARALLEL`.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anabranch.llm import LLM, SamplingParams
from anabranch.parallel.group import ONE_SHOT_BYTES
from tests.models import tiny

ROWS, WIDTH = 2048, 128
"""Of the largest captured step. A sum has 1 MiB, more than goes through a buffer."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 2,
    "max_num_batched_tokens": ROWS,
    "max_model_len": 2304,
    "num_pages": 320,
}
LENGTHS = 2100, 1100, 1100
PROMPTS = [[(7 * i + 17 * j * j + j) % tiny.VOCAB_SIZE for j in range(length)] for i, length in enumerate(LENGTHS)]
"""Greedy answers to them come near no tie: the best tokens are 0.09 apart."""


def save(folder: Path) -> Path:
    (case,) = (case for case in tiny.CASES if case.name == "qwen3_moe_published")
    more = {"hidden_size": WIDTH, "num_hidden_layers": 2, "max_position_embeddings": 4096}
    return tiny.save(replace(case, settings=case.settings | more), folder)


def answers(folder: str, num_ranks: int, graphs: str, expert_parallel: bool) -> dict[str, Any]:
    """The tokens of a prompt alone and of two in one step, and how often the largest steps were replayed."""
    replayed: Counter[str] = Counter()
    options = {"tensor_parallel_size": num_ranks, "expert_parallel": expert_parallel, "graphs": graphs, **OPTIONS}
    with LLM(folder, **options) as llm:
        forward = llm.engine.runner.forward
        for name in ("prompts", "prefills"):
            by_size = getattr(forward, name)
            if by_size is not None:
                assert by_size.sizes[-1] == ROWS
                for graph in by_size.made["any", ROWS].graphs:
                    _count(graph, name, replayed)
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        batches = PROMPTS[:1], PROMPTS[1:]
        tokens = [output.token_ids for prompts in batches for output in llm.generate(prompts, params)]
        one_shot = getattr(forward.model.group, "one_shot", None)
        return {
            "tokens": tokens,
            "replayed": dict(replayed),
            "buffer": None if one_shot is None else one_shot.buffer.nbytes,
        }


def _count(graph: Any, name: str, replayed: Counter[str]) -> None:
    replay = graph.replay

    def counted() -> None:
        replayed[name] += 1
        replay()

    graph.replay = counted


def compare(folder: Path, graphs: str, expert_parallel: bool, environment: Mapping[str, str]) -> None:
    """Two ranks answer as one and replay as much: one graph of a step of one request if `full`, else 3 pieces."""
    command = [sys.executable, "-m", "tests.parallel.largest", str(folder), graphs, str(expert_parallel)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=300, check=True)
    found = map(json.loads, done.stdout.splitlines())
    one, two = found
    expected = {"prompts": 1, "prefills": 3} if graphs == "full" else {"prefills": 6}
    assert one["tokens"] == two["tokens"]
    assert one["replayed"] == two["replayed"] == expected
    assert one["buffer"] is None and two["buffer"] == ONE_SHOT_BYTES < ROWS * WIDTH * 4


if __name__ == "__main__":
    for num_ranks in (1, 2):
        print(json.dumps(answers(sys.argv[1], num_ranks, sys.argv[2], sys.argv[3] == "True")), flush=True)
