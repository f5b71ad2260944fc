"""Measure the best tiles of a model's experts on this GPU and keep them for every later start.

Needs the model's config only: weights are random. A start measures too if no table fits; this command measures again
even if one does, and by default more thoroughly than a start has time for.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.config import CHOICES, EngineConfig
from anabranch.kernels.compiling import compile_server
from anabranch.loader.resolve import resolve
from anabranch.options import add_engine_options, at_least

if TYPE_CHECKING:
    import torch

    from anabranch.ops.weight import Weight


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = "the name of a config of bench offline, such as qwen3-30b-a3b"
    add("model", metavar="MODEL", help=f"a model folder or a hub id owner/name, its config.json is enough; or {names}")
    add("--tune", choices=CHOICES["tune"][1:], default="full", help="fast: in 15 seconds, as at start (default full)")
    add("--tokens", type=int, nargs="+", default=[], metavar="N", help="measure for batches of N tokens only")
    largest = "tokens of the largest step (default: that of `LLM`)"
    add("--max-num-batched-tokens", type=at_least(1), metavar="N", help=largest)
    add_engine_options(parser, "dtype", "quantization")
    add("--keep", action="store_true", help="measure only what no table has yet")
    add("--out", type=Path, metavar="FILE", help="write a table that can be shipped to a file too")


def run(options: argparse.Namespace) -> int:
    if any(tokens < 1 for tokens in options.tokens):
        raise ValueError("--tokens: a batch has at least 1 token")
    compile_server.start_early()  # so that its imports run in parallel with those of this process
    from anabranch import kernels, platforms
    from anabranch.bench.records import bundled
    from anabranch.engine.progress import Tally
    from anabranch.loader import names
    from anabranch.loader.checkpoint import with_stored_dtype
    from anabranch.loader.load import DTYPES, build
    from anabranch.loader.locate import locate
    from anabranch.models.config import read_config
    from anabranch.moe import tuning

    folder = locate(bundled(options.model, "dummy"), weights=False)
    config = with_stored_dtype(read_config(folder), folder)
    if config.sources and options.quantization != "none":
        raise ValueError(f"--quantization: {options.model} is quantised already; leave the option out")
    platform = platforms.current()
    kernels.bind(platform)
    tuner = tuning.find_tuner()
    if tuner is None:
        raise ValueError(f"platform {platform.name!r} has no kernels with tiles to choose: nothing to tune here")
    chosen = resolve(EngineConfig(model=options.model, dtype=options.dtype), config, platform)
    model = build(config, DTYPES[chosen.dtype])
    names.set_formats(model, options.quantization)
    shapes = tuning.shapes_of(model)
    if not shapes:
        raise ValueError(f"{options.model}: a model without experts has no tiles to tune")
    if options.out is not None and len(shapes) > 1:
        raise ValueError(f"--out: {options.model} has experts of {len(shapes)} shapes, a table holds one")
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


def draw(shape: tuple[Any, ...], device: torch.device) -> tuple[Weight, Weight]:
    """Random weights of one layer."""
    import torch

    from anabranch import formats, ops
    from anabranch.ops.weight import Weight

    num_experts, width, inner, _, dtype, format = shape

    chosen = formats.named(format)

    def normal(*size: int) -> Weight:
        data = torch.empty(size, dtype=dtype, device=device).normal_(std=size[-1] ** -0.5)
        weight = Weight.view(chosen, size, chosen.quantize(data))
        ops.experts.prepare(weight)
        return weight

    return normal(num_experts, 2 * inner, width), normal(num_experts, width, inner)


def report(tuner: Any, shape: tuple[Any, ...], tuned: Any) -> list[str]:
    E, D, inner, top_k, dtype, format = shape
    lines = [f"{E} experts of {D} × {inner}, {top_k} per token, {dtype}, {format}"]
    if tuned.table is None:
        return [*lines, "  nothing could be measured; the built-in tiles stay"]
    lines.append(f"{'tokens':>8}{'µs':>10}{'tried':>7}  tiles")
    for size, times in sorted(tuned.table.times.items()):
        best = min(times, key=times.__getitem__)
        mark = "" if size in tuned.measured else " (as before)"
        lines.append(f"{size:>8}{times[best]:>10.1f}{len(times):>7}  {tuner.label(best)}{mark}")
    missing = f"; no time was left for {', '.join(map(str, tuned.table.missing))}" if tuned.table.missing else ""
    return [*lines, f"{len(tuned.measured)} token counts measured in {tuned.seconds:.1f} s{missing}"]
