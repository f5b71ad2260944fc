"""What `--deterministic` costs on a CPU: processor seconds of the bundled model with it and without, in turns.

    OMP_NUM_THREADS=1 python benchmarks/deterministic_cost.py [--dtype float32] [--runs 4]

Each load is the best of the runs of two processes. Prompts are random tokens, sampling is greedy, the prefix cache is
off.
"""

import argparse
import multiprocessing
import random
import time

import torch

from anabranch import bundled
from anabranch.llm import LLM, SamplingParams

LOADS = {
    "16 requests of 200 + 32": (16, 200, 32),
    "1 request of 200 + 32": (1, 200, 32),
    "16 prompts of 200": (16, 200, 1),
    "4 prompts of 980": (4, 980, 1),
}
"""Requests, tokens of a prompt, tokens of an answer."""


def measure(dtype: str, runs: int, deterministic: bool) -> list[float]:
    """The best of some runs of each load, in a process of its own: kernels are chosen once in a process."""
    seconds = []
    options = {"dtype": dtype, "max_num_seqs": 16, "enable_prefix_caching": False}
    with LLM(bundled.folder(), deterministic=deterministic, **options) as llm:
        for count, length, num_tokens in LOADS.values():
            rng = random.Random(0)
            prompts = [[rng.randrange(300) for _ in range(length)] for _ in range(count)]
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
            found = []
            for _ in range(runs + 1):  # the first warms up
                began = time.process_time()
                llm.generate(prompts, params)
                found.append(time.process_time() - began)
            seconds.append(min(found[1:]))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=4)
    options = parser.parse_args()
    sides = []
    for deterministic in (False, True, False, True):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            sides.append(pool.apply(measure, (options.dtype, options.runs, deterministic)))
    print(f"{torch.get_num_threads()} threads, {options.dtype}, processor seconds: plain, deterministic, cost")
    for name, *seconds in zip(LOADS, *sides):
        plain, fixed = min(seconds[::2]), min(seconds[1::2])
        print(f"{name:>24}  {plain:.3f}  {fixed:.3f}  {fixed / plain - 1:+.0%}")


if __name__ == "__main__":
    main()
