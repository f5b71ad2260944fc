"""Routing and expert sort on a GPU: the kernels, the eager reference, and the reference under torch.compile.

    python benchmarks/route.py [--compile] [--json FILE]

128 experts, top 8, renormalised, with a per-expert scale (Gemma 4's router). Logits from a normal distribution, four
sets in turn. µs per call, two ways: `graph`, a chain of calls replayed as a CUDA graph (what the engine does), and
`called`, the same calls one by one from Python, which is what torch.compile's own graphs can be compared with. Every
result is checked against the reference first. With --compile: torch.compile in three modes, in processes of their own
that compile together and are timed one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.multiprocessing as mp

from anabranch import ops

NUM_EXPERTS, TOP_K = 128, 8
TOKENS = (1, 2, 16, 64, 256, 1024, 2048, 4096, 16384, 250000)
COMPARED = (1, 2, 2048, 250000)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TARGETS = {"bf16": {1: 2.0, 64: 2.2, 2048: 3, 16384: 5, 250000: 50}, "fp32": {1: 2.5, 250000: 90}}
MODES = ("default", "reduce-overhead", "max-autotune")
SORT_TOKENS = (1, 16, 64, 256, 512, 1024, 4096, 16384)
SORT_TARGETS = {256: 3.0, 16384: 10.0}
READ_BYTES_PER_US = 4.6e6
"""A read-only stream on an H200, measured."""

Calls = list[Callable[[], Any]]


def draw(tokens: int, dtype: str, num_sets: int = 4) -> list[torch.Tensor]:
    return [(2 * torch.randn(tokens, NUM_EXPERTS, device="cuda")).to(DTYPES[dtype]) for _ in range(num_sets)]


def median_us(run: Callable[[], None], num_calls: int, repeats: int = 7) -> float:
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / num_calls)
    return sorted(times)[repeats // 2]


def time_graph(calls: Calls, num_calls: int) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            calls[i % len(calls)]()
    graph.replay()
    return median_us(graph.replay, num_calls)


def time_called(calls: Calls, num_calls: int) -> float:
    def run() -> None:
        for i in range(num_calls):
            calls[i % len(calls)]()

    run()
    return median_us(run, num_calls, repeats=5)


def num_calls(tokens: int) -> int:
    return 100 if tokens <= 4096 else 20 if tokens < 100_000 else 8


def time_route(function: Callable[..., Any], dtype: str, tokens: int, scale_E: torch.Tensor) -> dict[str, float]:
    sets = draw(tokens, dtype)
    weight_TK, expert_TK = function(sets[0], TOP_K, expert_scale_E=scale_E)
    expected_weight_TK, expected_expert_TK = ops.route.reference(sets[0], TOP_K, expert_scale_E=scale_E)
    assert torch.equal(expert_TK, expected_expert_TK), f"{dtype}, {tokens} tokens: other experts than the reference's"
    torch.testing.assert_close(weight_TK, expected_weight_TK, rtol=2e-5, atol=1e-7)
    calls: Calls = [lambda x=x: function(x, TOP_K, expert_scale_E=scale_E) for x in sets]  # type: ignore[misc]
    return {"graph": time_graph(calls, num_calls(tokens)), "called": time_called(calls, min(20, num_calls(tokens)))}


def time_sort(tokens: int) -> float:
    from anabranch.kernels.triton import expert_sort

    sets = [torch.rand(tokens, NUM_EXPERTS, device="cuda").topk(TOP_K).indices.int() for _ in range(4)]
    found, expected = (f(sets[0], NUM_EXPERTS) for f in (expert_sort.expert_sort, ops.expert_sort.reference))
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    return time_graph([lambda x=x: expert_sort.expert_sort(x, NUM_EXPERTS) for x in sets], num_calls(tokens))  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------------------
# torch.compile
# ---------------------------------------------------------------------------------------------------------------------


def time_compiled(dtype: str, mode: str, ready: Any, turn: Any, results: Any) -> None:
    """In a process of its own: compile, wait for the others, then be timed alone."""
    times: dict[str, Any] = {}
    try:
        function = torch.compile(ops.route.reference, mode=mode)
        scale_E = torch.rand(NUM_EXPERTS, device="cuda")
        began = time.perf_counter()
        for tokens in COMPARED:
            for _ in range(3):
                function(draw(tokens, dtype, 1)[0], TOP_K, expert_scale_E=scale_E)
        torch.cuda.synchronize()
        times["compile_s"] = time.perf_counter() - began
    except Exception as error:  # another process's figures are not lost with this one
        times["error"] = f"{type(error).__name__}: {error}"[:200]
    with contextlib.suppress(Exception):
        ready.wait(timeout=90)
    with turn:
        for tokens in COMPARED if "error" not in times else ():
            sets = draw(tokens, dtype)
            calls: Calls = [lambda x=x: function(x, TOP_K, expert_scale_E=scale_E) for x in sets]  # type: ignore[misc]
            times[str(tokens)] = {"called": time_called(calls, min(20, num_calls(tokens)))}
            if mode == "default":  # the other modes bring graphs of their own
                times[str(tokens)]["graph"] = time_graph(calls, num_calls(tokens))
        results.put((dtype, mode, times))


def compare_with_compile() -> Iterator[tuple[str, str, dict[str, Any]]]:
    cases = [(dtype, mode) for dtype in DTYPES for mode in MODES]
    context = mp.get_context("spawn")
    ready, turn, results = context.Barrier(len(cases)), context.Lock(), context.Queue()
    workers = [context.Process(target=time_compiled, args=(*case, ready, turn, results)) for case in cases]
    for worker in workers:
        worker.start()
    for _ in workers:
        yield results.get(timeout=200)
    for worker in workers:
        worker.join()


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also against torch.compile (a minute)")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    from anabranch.kernels.triton import route

    compiled = {}
    if options.compile:
        for dtype, mode, times in compare_with_compile():
            compiled[f"{dtype} {mode}"] = times
            print(f"torch.compile {dtype} {mode}: {times}", flush=True)

    torch.manual_seed(0)
    scale_E = torch.rand(NUM_EXPERTS, device="cuda") + 0.5
    routing: dict[str, Any] = {}
    print("route   tokens    graph  target   read   called    eager  eager called")
    for dtype in DTYPES:
        for tokens in TOKENS:
            ours = time_route(route.route, dtype, tokens, scale_E)
            eager = time_route(ops.route.reference, dtype, tokens, scale_E) if tokens in COMPARED else {}
            routing[f"{dtype} {tokens}"] = {"ours": ours, "eager": eager}
            target = TARGETS.get(dtype, {}).get(tokens, "")
            read = tokens * NUM_EXPERTS * DTYPES[dtype].itemsize / READ_BYTES_PER_US
            print(
                f"{dtype:>6} {tokens:7} {ours['graph']:8.2f} {target:>7} {read:6.1f} {ours['called']:8.1f} "
                f"{eager.get('graph', 0):8.1f} {eager.get('called', 0):12.1f}",
                flush=True,
            )
    sorting = {str(tokens): time_sort(tokens) for tokens in SORT_TOKENS}
    print(
        "expert sort: " + ", ".join(f"{n} tokens {t:.2f} ({SORT_TARGETS.get(int(n), '-')})" for n, t in sorting.items())
    )
    if compiled:
        print("ratios to ours, as called / by graph replay:")
        for dtype in DTYPES:
            for tokens in COMPARED:
                entry = routing[f"{dtype} {tokens}"]
                row = [f"eager {entry['eager']['called'] / entry['ours']['called']:.1f}"]
                row[0] += f" / {entry['eager']['graph'] / entry['ours']['graph']:.1f}"
                for mode in MODES:
                    times = compiled[f"{dtype} {mode}"].get(str(tokens), {})
                    ratios = [f"{times[how] / entry['ours'][how]:.1f}" for how in ("called", "graph") if how in times]
                    # torch.compile's own graphs have no other form: against our replayed graph too.
                    if mode != "default" and "called" in times:
                        ratios.append(f"{times['called'] / entry['ours']['graph']:.1f} called : graph")
                    row.append(f"{mode} {' / '.join(ratios)}")
                print(f"  {dtype} {tokens}: " + ", ".join(row))
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        report = {
            "command": "python " + " ".join(sys.argv),
            "commit": commit,
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "unit": "µs",
            "route": routing,
            "torch.compile": compiled,
            "expert_sort": sorting,
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
