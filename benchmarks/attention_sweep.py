"""Attention on a GPU: every candidate tile checked and timed, to choose tiles and limits from.

    PYTHONPATH=src python3 benchmarks/attention_sweep.py --json FILE                  all of it, some minutes
    PYTHONPATH=src python3 benchmarks/attention_sweep.py --only decode --shapes qwen3-30b-a3b --sizes 1x128 64x1024
    PYTHONPATH=src python3 benchmarks/attention_sweep.py --chosen                     the shipped choice only
    PYTHONPATH=src python3 benchmarks/attention_sweep.py --fp8                        with pages in FP8
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/attention_sweep.py            tiny, without a GPU: does it run?

Sizes are REQUESTSxCONTEXT for decode, `skewed` being 64 requests of which one is long, and NEWxCONTEXT for prefill of
one request, `mixed` being a chunk of 512 tokens beside 64 that decode.

µs per call in a replayed graph, the median of several replays; calls go through several sets of pages, so that L2
holds none of them, and each starts before its predecessor is done, as in a captured step. Floor: the larger of bytes at
4.6 TB/s and arithmetic at 777 TFLOP/s, as measured on an H200. Each result is compared with an fp32 reference first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from anabranch import ops, platforms
from anabranch.kernels.compiling.precompile import precompile, recording
from anabranch.kernels.triton import attention, attention_tiles
from anabranch.kernels.triton.attention_tiles import DecodeTile, HopperTile, PrefillTile
from anabranch.kernels.tuning.timing import microseconds
from anabranch.ops.attention import take

TINY = not torch.cuda.is_available()
DEVICE, DTYPE = ("cpu", torch.float32) if TINY else ("cuda", torch.bfloat16)
BANDWIDTH, FLOPS = 4.6e12, 777e12
COLD_BYTES = 1 if TINY else 256 << 20
TOLERANCE = 1e-2
DECODE = ("2x20",) if TINY else tuple(f"{r}x{n}" for r in (1, 16, 64, 256) for n in (128, 1024, 4096, 8192))
PREFILL = ("9x20",) if TINY else ("128x128", "1024x1024", "4096x4096", "8192x8192", "1024x8192", "64x8192")
SIZES = {"decode": (*DECODE, "skewed"), "prefill": (*PREFILL, "mixed")}
Row = dict[str, Any]
Tile = DecodeTile | PrefillTile | HopperTile
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "decode": (
        DecodeTile(64, 4, 3, swap=True),
        DecodeTile(64, 4, 3, swap=True, fetch=True),
        DecodeTile(64, 4, 4, swap=True, programs=1),
        DecodeTile(64, 4, 2, swap=True, programs=3),
        DecodeTile(128, 4, 2, swap=True, programs=1),
        DecodeTile(128, 4, 3, programs=1),
        DecodeTile(128, 8, 3),
        DecodeTile(64, 4, 3),
        DecodeTile(64, 4, 4),
        DecodeTile(64, 4, 4, fetch=True),
        DecodeTile(32, 4, 4),
        DecodeTile(32, 4, 3, fetch=True),
        DecodeTile(32, 2, 4, programs=3),
        DecodeTile(32, 8, 3, programs=1),
        DecodeTile(16, 4, 4),
    ),
    "prefill": (
        PrefillTile(128, 64, 8, 2),
        PrefillTile(128, 64, 8, 3),
        PrefillTile(128, 128, 8, 2),
        PrefillTile(128, 32, 8, 3),
        PrefillTile(64, 32, 4, 3),
        PrefillTile(64, 64, 4, 2),
        PrefillTile(64, 64, 4, 3),
        PrefillTile(64, 128, 4, 2),
        PrefillTile(64, 32, 8, 2),
        HopperTile(128, 2),
        HopperTile(128, 3),
        HopperTile(64, 2),
        HopperTile(64, 4),
    ),
}
"""Tiles to time on Hopper; which of them fit depends on the head dim."""


@dataclass(frozen=True)
class Shape:
    name: str
    heads: int
    kv_heads: int
    dim: int
    window: int = 0


SHAPES = (
    (Shape("tiny", 4, 2, 16, 5),)
    if TINY
    else (
        Shape("qwen3-30b-a3b", 32, 4, 128),
        Shape("qwen1.5-moe-a2.7b", 16, 16, 128),
        Shape("gemma-4 sliding", 16, 8, 256, 1024),
        Shape("gemma-4 global", 16, 2, 512),
    )
)


def requests_of(what: str, size: str) -> list[tuple[int, int]]:
    """(new tokens, context) of each request."""
    small, large = (2, 30) if TINY else (64, 8192)
    if size == "skewed":
        return [(1, large)] + [(1, large // 16)] * (small - 1)
    if size == "mixed":
        return [(large // 16, large // 16)] + [(1, large // 8)] * small
    first, context = map(int, size.split("x"))
    return [(1, context)] * first if what == "decode" else [(first, context)]


def draw(shape: Shape, requests: list[tuple[int, int]], page_size: int, fp8: bool) -> list[Row]:
    """The arguments of calls that differ in their pages; the longest table has room to spare, as a captured one."""
    pages = [-(-length // page_size) for _, length in requests]
    token_bytes = 2 * shape.kv_heads * shape.dim * (1 if fp8 else DTYPE.itemsize)
    seen = sum(min(length, new + shape.window if shape.window else length) for new, length in requests)
    num_sets = min(16, max(1, -(-COLD_BYTES // (seen * token_bytes))))
    cache = torch.randn(2, num_sets * sum(pages), page_size, shape.kv_heads, shape.dim, dtype=DTYPE, device=DEVICE)
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    order = torch.randperm(cache.shape[1], dtype=torch.int32).split(sum(pages))
    start = torch.tensor([0] + [new for new, _ in requests]).cumsum(0).int()
    calls = []
    for mine in order:
        table = torch.zeros(len(requests), 2 * max(pages), dtype=torch.int32)
        for r, own in enumerate(mine.split(pages)):
            table[r, : len(own)] = own
        calls.append(
            {
                "q_THD": torch.randn(int(start[-1]), shape.heads, shape.dim, dtype=DTYPE, device=DEVICE),
                "k_PSGD": cache[0],
                "v_PSGE": cache[1],
                "page_table_RM": table.to(DEVICE),
                "query_start_R": start.to(DEVICE),
                "context_len_R": torch.tensor([length for _, length in requests], dtype=torch.int32).to(DEVICE),
                "scale": shape.dim**-0.5,
                "window": shape.window,
                "max_query": max(new for new, _ in requests),
            }
        )
    return calls


def reference(call: Row, requests: list[tuple[int, int]]) -> torch.Tensor:
    """fp32, a request at a time and of long ones 512 rows at a time: all scores at once would not fit."""
    out, row = [], 0
    for r, (new, length) in enumerate(requests):
        for begin in range(0, new, 512):
            end = min(begin + 512, new)
            pages = call["page_table_RM"][r].long()
            given = call | {
                "q_THD": call["q_THD"][row + begin : row + end].float(),
                "k_PSGD": take(call["k_PSGD"], pages).float(),
                "v_PSGE": take(call["v_PSGE"], pages).float(),
                "page_table_RM": torch.arange(len(pages), dtype=torch.int32, device=DEVICE)[None],
                "query_start_R": torch.tensor([0, end - begin], dtype=torch.int32, device=DEVICE),
                "context_len_R": torch.tensor([length - new + end], dtype=torch.int32, device=DEVICE),
            }
            out.append(ops.attention.reference(ops.AttentionCall(**given)))
        row += new
    return torch.cat(out)


def floor_us(shape: Shape, requests: list[tuple[int, int]], fp8: bool) -> float:
    num_bytes, flops = 0.0, 0.0
    for new, length in requests:
        seen = min(length, new + shape.window) if shape.window else length
        num_bytes += 2 * shape.kv_heads * seen * shape.dim * (1 if fp8 else DTYPE.itemsize)
        num_bytes += 2 * shape.heads * new * shape.dim * DTYPE.itemsize
        scores = sum(min(i, shape.window or i) for i in range(length - new + 1, length + 1))
        flops += 4 * scores * shape.heads * shape.dim
    return 1e6 * max(num_bytes / BANDWIDTH, flops / FLOPS)


def chosen(what: str, shape: Shape, requests: list[tuple[int, int]], options: argparse.Namespace) -> Tile:
    machine = attention.machine_of(platforms.current().device)
    if what == "decode":
        pairs = len(requests) * shape.kv_heads
        return attention_tiles.choose_decode(pairs, shape.dim, DTYPE, machine, options.fp8)
    tokens = sum(new for new, _ in requests)
    page = 0 if options.fp8 else options.page_size
    return attention_tiles.choose_prefill(tokens * shape.heads, shape.dim, DTYPE, machine, page)


def tiles_of(what: str, shape: Shape, requests: list[tuple[int, int]], options: argparse.Namespace) -> list[Tile]:
    usual, machine = chosen(what, shape, requests, options), attention.machine_of(platforms.current().device)
    page = 0 if options.fp8 else options.page_size
    fitting = [
        tile
        for tile in CANDIDATES[what]
        if tile != usual and attention_tiles.fits(tile, shape.dim, DTYPE, machine, page)
    ]
    return [usual] if options.chosen else [usual, *fitting]


@contextmanager
def override(what: str, tile: Tile) -> Iterator[None]:
    setattr(attention_tiles, f"{what}_override", tile)
    try:
        yield
    finally:
        setattr(attention_tiles, f"{what}_override", None)


def measure(what: str, shape: Shape, size: str, options: argparse.Namespace) -> Iterator[Row]:
    requests = requests_of(what, size)
    calls = draw(shape, requests, options.page_size, options.fp8)
    expected, floor = reference(calls[0], requests), floor_us(shape, requests, options.fp8)
    for place, tile in enumerate(tiles_of(what, shape, requests, options)):
        row = {"part": what, "shape": shape.name, "size": size, "tile": short(tile), "chosen": place == 0}
        with override(what, tile):
            try:
                found = attention.attention(ops.AttentionCall(**calls[0]))
                error = ((found.double() - expected.double()).norm() / expected.double().norm()).item()
                timed = [partial(attention.attention, ops.AttentionCall(**call)) for call in calls]
                us = microseconds(platforms.current(), timed, repeats=1 if TINY else 7)
            except Exception as fault:  # a tile that does not run must not end the sweep
                yield {**row, "us": None, "right": False, "fault": f"{type(fault).__name__}: {fault}"[:200]}
                continue
        yield {**row, "us": us, "floor_us": floor, "error": error, "right": error <= TOLERANCE}


def compile_all(cases: list[tuple[str, Shape, str]], options: argparse.Namespace) -> None:
    """All kernels at once, in parallel processes."""
    begin = time.perf_counter()
    with recording() as jobs:
        for what, shape, size in cases:
            requests = requests_of(what, size)
            brief = [(new, min(length, new + 16)) for new, length in requests]
            call = draw(shape, brief, options.page_size, options.fp8)[0]
            # Whether work is split depends on the width of the table.
            wide = -(-2 * max(length for _, length in requests) // options.page_size)
            call["page_table_RM"] = call["page_table_RM"].new_zeros(len(requests), wide)
            for tile in tiles_of(what, shape, requests, options):
                with override(what, tile):
                    attention.attention(ops.AttentionCall(**call))
    failed = precompile(jobs)
    print(
        f"{len(jobs)} kernels compiled in {time.perf_counter() - begin:.0f} s; failed: {failed or 'none'}", flush=True
    )


def short(tile: Tile) -> str:
    if isinstance(tile, HopperTile):
        return f"hopper {tile.keys} s{tile.stages}"
    if isinstance(tile, PrefillTile):
        return f"{tile.rows}x{tile.keys} w{tile.warps} s{tile.stages}"
    flags = (" swap" if tile.swap else "") + (" fetch" if tile.fetch else "")
    return f"{tile.keys} w{tile.warps} s{tile.stages} p{tile.programs}{flags}"


def show(rows: list[Row], best: int) -> None:
    """One line: the chosen tile (*), the fastest right ones, and what went wrong."""
    right = sorted((row for row in rows if row["right"]), key=lambda row: row["us"])
    first = rows[0]
    floor = right[0]["floor_us"] if right else float("nan")
    line = f"{first['part']:7} {first['shape']:17} {first['size']:9} floor {floor:8.2f}"
    for row in right[:best] + [row for row in right[best:] if row["chosen"]]:
        line += f" | {row['tile']}{'*' if row['chosen'] else ''} {row['us']:.2f} ({100 * floor / row['us']:.0f} %)"
    for row in rows:
        if not row["right"]:
            line += f" | WRONG {row['tile']}: {row.get('fault') or row['error']}"
    print(line, flush=True)


def save(file: Path, rows: list[Row]) -> None:
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here)
    head = {
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "machine": "interpreter" if TINY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**head, "rows": rows}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--sizes", nargs="*", help="of all that is listed above; default: all")
    parser.add_argument("--chosen", action="store_true", help="no other candidates")
    parser.add_argument("--best", type=int, default=3, help="tiles to print of each case; * is the chosen one")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--fp8", action="store_true", help="pages in FP8")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cases = [
        (what, shape, size)
        for what in options.only
        for shape in SHAPES
        if shape.name in options.shapes
        for size in SIZES[what]
        if not options.sizes or size in options.sizes
    ]
    rows: list[Row] = []
    with torch.inference_mode():
        if not TINY:
            torch.backends.cuda.matmul.allow_tf32 = False
            compile_all(cases, options)
        for case in cases:
            found = list(measure(*case, options))
            rows += found
            show(found, options.best)
            if options.json:  # after each case: what is measured is not lost
                save(options.json, rows)
    print(f"{len(rows)} rows, {sum(not row['right'] for row in rows)} wrong or not run")
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
