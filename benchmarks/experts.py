"""Time of the experts alone (plan, gate/up, activation, down, combine; routing given) for three models' shapes.

    python benchmarks/experts.py --json benchmarks/results/experts_h200.json
    python benchmarks/experts.py --combine all           # fused against ordered against unfused
    python benchmarks/experts.py --sweep --tokens 64     # every candidate tile

A CUDA graph of calls over several weight sets, so that weights are cold in L2; every call has its own tokens and its
own routing. Each result is compared with an fp32 reference first. The floor is the larger of the bytes that must be
read at 4.6 TB/s and the arithmetic at 777 TFLOP/s, both measured on an H200.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from anabranch.kernels.triton import experts as kernel
from anabranch.kernels.triton import experts_tiles
from anabranch.kernels.triton.experts_tiles import GroupedTiles, HopperTiles, SmallTiles, Tile, Tiles

BANDWIDTH, FLOPS = 4.6e12, 777e12
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOLERANCE = 1e-2
DTYPE = torch.bfloat16
KINDS: dict[str, type] = {"small": SmallTiles, "grouped": GroupedTiles, "hopper": HopperTiles}


@dataclass(frozen=True, eq=False)
class Shape:
    name: str
    num_experts: int
    width: int
    inner: int
    top_k: int
    activation: str
    target: dict[int, float]
    """µs per token count to be reached."""
    vllm: dict[int, float]
    """µs per token count of vLLM 0.25.1's Triton path on an H200, measured the same way."""


def per_tokens(*values: float) -> dict[int, float]:
    return dict(zip((1, 2, 4, 8, 16, 32, 64, 256, 1024, 2048, 4096, 8192, 16384), values))


SHAPES = (
    Shape(
        "qwen3-30b-a3b",
        *(128, 2048, 768, 8, "silu"),
        per_tokens(21, 38, 69, 120, 188, 260, 286, 303, 335, 395, 620, 1090, 2090),
        per_tokens(29.1, 47.8, 78.8, 135.5, 201.5, 271.6, 299.6, 329, 391, 496, 810, 1539, 2908),
    ),
    Shape(
        "gemma-4-26b-a4b",
        *(128, 2816, 704, 8, "gelu_tanh"),
        per_tokens(27, 50, 92, 155, 240, 320, 366, 385, 430, 500, 790, 1400, 2680),
        per_tokens(36.9, 59.8, 106.8, 166, 251, 328, 380, 407, 501, 646, 1142, 2079, 3877),
    ),
    Shape(
        "qwen1.5-moe-a2.7b",
        *(60, 2048, 1408, 4, "silu"),
        per_tokens(22, 38, 68, 118, 176, 230, 256, 268, 300, 390, 590, 1020, 1950),
        per_tokens(29.8, 45.0, 84.6, 129, 187, 237, 267, 284, 331, 484, 773, 1460, 2727),
    ),
)


def draw_weights(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=DTYPE) * size[-1] ** -0.5

    E, D, inner = shape.num_experts, shape.width, shape.inner
    return draw(E, 2 * inner, D), draw(E, D, inner)


def make_call(shape: Shape, tokens: int, weights: tuple[torch.Tensor, torch.Tensor], zipf: bool) -> kernel.Call:
    logits = torch.randn(tokens, shape.num_experts, device="cuda")
    if zipf:  # Gumbel's trick: the r-th most popular expert is chosen with a probability in proportion to 1 / r
        rank = torch.randperm(shape.num_experts, device="cuda") + 1
        logits = -torch.log(-torch.log(torch.rand_like(logits))) - torch.log(rank.float())
    weight, expert = logits.softmax(-1).topk(shape.top_k)
    weight = weight / weight.sum(-1, keepdim=True)
    x = torch.randn(tokens, shape.width, device="cuda", dtype=DTYPE)
    return kernel.Call(x, weight, expert.int(), *weights, shape.activation)


def reference(call: kernel.Call) -> torch.Tensor:
    """fp32, expert by expert."""
    y = torch.zeros_like(call.x_TD, dtype=torch.float32)
    for e in range(call.down_EDI.shape[0]):
        token, slot = (call.expert_TK == e).nonzero(as_tuple=True)
        gate, up = (call.x_TD[token].float() @ call.gate_up_EFD[e].float().T).chunk(2, dim=-1)
        gate = F.silu(gate) if call.activation == "silu" else F.gelu(gate, approximate="tanh")
        y.index_add_(0, token, (gate * up @ call.down_EDI[e].float().T) * call.weight_TK[token, slot, None])
    return y


def error_of(out: torch.Tensor, expected: torch.Tensor) -> float:
    return ((out.double() - expected.double()).norm() / expected.double().norm()).item()


def graph_us(functions: list[Callable[[], object]], budget_s: float = 0.04) -> float:
    """Median µs of one function over replays of a graph that runs each of them once."""
    functions[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 7 or (time.perf_counter() - begin < budget_s and len(times) < 200):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(functions))
    times = sorted(times[2:])
    return times[len(times) // 2]


def floor_us(shape: Shape, tokens: int, calls: list[kernel.Call]) -> float:
    hit = sum(call.expert_TK.unique().numel() for call in calls) / len(calls)
    elements = 3 * shape.width * shape.inner
    num_bytes = (hit * elements + 2 * tokens * shape.width) * DTYPE.itemsize
    return 1e6 * max(num_bytes / BANDWIDTH, 2 * tokens * shape.top_k * elements / FLOPS)


def variants(shape: Shape, tokens: int, options: argparse.Namespace) -> dict[str, Tiles]:
    size = (tokens, shape.num_experts, shape.width, shape.inner, shape.top_k, DTYPE)
    if options.sweep:
        wanted = tuple(KINDS[kind] for kind in options.only)
        return {short(tiles): tiles for tiles in experts_tiles.candidates(*size) if isinstance(tiles, wanted)}
    machine = kernel.machine_of(torch.device("cuda", torch.cuda.current_device()))
    modes = ("auto", "fused", "ordered", "unfused") if options.combine == "all" else (options.combine,)
    return {mode: experts_tiles.choose(*size, mode, machine) for mode in modes}


def short(tiles: Tiles) -> str:
    def one(tile: Tile) -> str:
        group = "" if tile.group == experts_tiles.MANY else f" g{tile.group}"
        return f"{tile.columns}x{tile.depth} s{tile.stages}{' swap' if tile.swap else ''}{group}"

    if isinstance(tiles, SmallTiles):
        how = ("token" if tiles.by_token else "pair") + (" share" if tiles.share else "")
        gate, down = f"{tiles.gate_rows}/{tiles.gate_warps}", f"{tiles.down_columns}/{tiles.down_warps}"
        return f"small gate {gate} down {down} ahead {tiles.ahead} {how}"
    if isinstance(tiles, HopperTiles):
        rows = f"{64 * tiles.slabs}{f'+{tiles.extra}' if tiles.extra else ''}/{tiles.groups}"
        return f"hopper {rows} p{tiles.programs}: {one(tiles.gate_up)} | {one(tiles.down)}"
    how = (" match" if tiles.match else "") + (" add" if tiles.add else "")
    return f"grouped {tiles.rows}{how}: {one(tiles.gate_up)} | {one(tiles.down)}"


def compile_one(job: tuple[Shape, int, Tiles]) -> str | None:
    """Run once, on garbage, so that the kernels are in the disk cache; what went wrong, or None."""
    shape, tokens, tiles = job
    E, D, inner = shape.num_experts, shape.width, shape.inner
    weights = (
        torch.empty(E, 2 * inner, D, device="cuda", dtype=DTYPE),
        torch.empty(E, D, inner, device="cuda", dtype=DTYPE),
    )
    try:
        kernel.run(make_call(shape, tokens, weights, False), tiles)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{shape.name} {tokens} {short(tiles)}: {type(error).__name__} {str(error)[:300]}"
    return None


def compile_all(jobs: set[tuple[Shape, int, Tiles]], num_workers: int) -> None:
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        for fault in pool.imap_unordered(compile_one, jobs, chunksize=2):
            if fault:
                print("does not run:", fault, flush=True)
    print(f"{len(jobs)} variants compiled in {time.perf_counter() - begin:.0f} s", flush=True)


def measure(
    shape: Shape, tokens: int, calls: list[kernel.Call], options: argparse.Namespace
) -> list[dict[str, object]]:
    """A row per variant, the fastest right one first."""
    expected = reference(calls[0])
    floor, rows = floor_us(shape, tokens, calls), []
    for label, tiles in variants(shape, tokens, options).items():
        error = error_of(kernel.run(calls[0], tiles), expected)
        us = graph_us([partial(kernel.run, call, tiles) for call in calls])
        rows.append(
            {
                "shape": shape.name,
                "tokens": tokens,
                "variant": label,
                "us": round(us, 2),
                "floor_us": round(floor, 2),
                "target_us": shape.target.get(tokens),
                "vllm_us": shape.vllm.get(tokens),
                "error": error,
                "right": error <= TOLERANCE,
                "tiles": short(tiles),
            }
        )
    return rows if options.combine == "all" else sorted(rows, key=lambda row: (not row["right"], row["us"]))


def show(row: dict[str, object]) -> None:
    us, floor, target, vllm = (float(row[key] or math.nan) for key in ("us", "floor_us", "target_us", "vllm_us"))
    verdict = "WRONG" if not row["right"] else "" if math.isnan(target) else "ok" if us <= target else "over"
    print(
        f"{row['shape']:18} {row['tokens']:6} {us:8.1f} µs  floor {floor:7.1f} ({100 * floor / us:3.0f} %)  "
        f"target {target:6.0f} {verdict:5} vLLM {vllm:6.0f}  err {row['error']:.1e}  {row['variant']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--combine", default="auto", choices=("auto", "fused", "ordered", "unfused", "all"))
    parser.add_argument("--zipf", action="store_true", help="skewed routing")
    parser.add_argument("--sweep", action="store_true", help="time every candidate tile")
    parser.add_argument("--only", nargs="*", default=list(KINDS), choices=KINDS, help="kinds of tiles to sweep")
    parser.add_argument("--best", type=int, default=1, help="variants to print per token count in a sweep")
    parser.add_argument("--sets", type=int, default=4, help="weight sets")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile; 0: none")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    if options.workers:
        # Above 512 tokens the number of tokens does not change the code.
        sizes = {tokens: min(tokens, 2048) if tokens > 512 else tokens for tokens in options.tokens}
        compile_all(
            {
                (shape, size, tiles)
                for shape in shapes
                for tokens, size in sizes.items()
                for tiles in variants(shape, tokens, options).values()
            },
            options.workers,
        )
    rows: list[dict[str, object]] = []
    for shape in shapes:
        weights = [draw_weights(shape) for _ in range(options.sets)]
        for tokens in options.tokens:
            torch.manual_seed(tokens)
            count = 16 if tokens <= 64 else 4
            calls = [make_call(shape, tokens, weights[i % len(weights)], options.zipf) for i in range(count)]
            found = measure(shape, tokens, calls, options)
            rows += found
            for place, row in enumerate(found):
                if place < options.best or options.combine == "all" or not row["right"]:
                    show(row)
        del weights, calls
        torch.cuda.empty_cache()
    if options.json:
        here = Path(__file__).parent
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here)
        head = {
            "commit": commit.stdout.strip(),
            "command": " ".join(["python", *sys.argv]),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "routing": "zipf" if options.zipf else "uniform",
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
