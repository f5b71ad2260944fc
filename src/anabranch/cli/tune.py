"""Measure the best tiles of a model's experts on this GPU and keep them for every later start.

MODEL is a folder as Hugging Face lays it out, or a hub id; its config is enough, weights are drawn. A start does the
same by itself where no table fits; by hand it measures anew, and with --tune full more than a start has time for.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.config import CHOICES, EngineConfig, resolve
from anabranch.kernels import compile_server
from anabranch.ranges import at_least

if TYPE_CHECKING:
    import torch


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--tune", choices=CHOICES["tune"][1:], default="full", help="default %(default)s")
    parser.add_argument("--tokens", type=int, nargs="+", default=[], metavar="N", help="only for batches of N tokens")
    parser.add_argument(
        "--max-num-batched-tokens",
        type=at_least(1),
        metavar="N",
        help="tokens of the largest step (default: as `LLM` chooses)",
    )
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    parser.add_argument("--keep", action="store_true", help="measure only what no table has yet")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write a table that can be shipped")


def run(options: argparse.Namespace) -> int:
    if any(tokens < 1 for tokens in options.tokens):
        raise ValueError("--tokens: a batch has at least 1 token")
    compile_server.start_early()  # imports what it needs while this process does
    from anabranch import kernels, platforms
    from anabranch.engine.progress import Tally
    from anabranch.loader.load import DTYPES, build
    from anabranch.loader.locate import locate
    from anabranch.models.config import read_config
    from anabranch.moe import tuning

    config = read_config(locate(options.model, weights=False))
    platform = platforms.current()
    kernels.bind(platform)
    if not tuning.can_be_tuned():
        raise ValueError(f"platform {platform.name!r} has no kernels with tiles to choose: nothing to tune here")
    chosen = resolve(EngineConfig(model=options.model, dtype=options.dtype), config, platform)
    model = build(config, platform, DTYPES[chosen.dtype])
    shapes = tuning.shapes_of(model)
    if not shapes:
        raise ValueError(f"{options.model}: a model without experts has no tiles to tune")
    if options.out is not None and len(shapes) > 1:
        raise ValueError(f"--out: {options.model} has experts of {len(shapes)} shapes, a table holds one")
    tuner = importlib.import_module("anabranch.kernels.triton.experts_tuner")
    for shape, activation in shapes:
        tuned = tuner.ensure(
            tuner.Shape(*shape),
            [draw(shape, platform.device) for _ in range(tuner.SETS)],
            activation,
            platform,
            options.tune,
            options.max_num_batched_tokens or chosen.max_num_batched_tokens,
            Tally("measuring tiles"),
            sizes=tuple(options.tokens),
            again=not options.keep,
        )
        print("\n".join(report(tuner, shape, tuned)))
        if options.out is not None and tuned.table is not None:
            tuner.ship(options.out, tuner.Shape(*shape), platform.device, tuned.table)
            print(f"written to {options.out}")
    return 0


def draw(shape: tuple[int, int, int, int, torch.dtype], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's weights."""
    import torch

    num_experts, width, inner, _, dtype = shape
    gate_up_EFD = torch.empty(num_experts, 2 * inner, width, dtype=dtype, device=device).normal_(std=width**-0.5)
    down_EDI = torch.empty(num_experts, width, inner, dtype=dtype, device=device).normal_(std=inner**-0.5)
    return gate_up_EFD, down_EDI


def report(tuner: Any, shape: tuple[Any, ...], tuned: Any) -> list[str]:
    E, D, inner, top_k, dtype = shape
    lines = [f"{E} experts of {D} × {inner}, {top_k} per token, {dtype}"]
    if tuned.table is None:
        return [*lines, "  nothing could be measured; the built-in tiles stay"]
    lines.append(f"{'tokens':>8}{'µs':>10}{'tried':>7}  tiles")
    for size, times in sorted(tuned.table.times.items()):
        best = min(times, key=times.__getitem__)
        mark = "" if size in tuned.measured else " (as before)"
        lines.append(f"{size:>8}{times[best]:>10.1f}{len(times):>7}  {tuner.label(best)}{mark}")
    missing = f"; no time was left for {', '.join(map(str, tuned.table.missing))}" if tuned.table.missing else ""
    return [*lines, f"{len(tuned.measured)} token counts measured in {tuned.seconds:.1f} s{missing}"]
