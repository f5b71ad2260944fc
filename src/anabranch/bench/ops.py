"""Time each op alone, as the engine calls it: µs, GB/s or TFLOP/s, and the share of what the machine can do.

    anabranch bench ops                          every op, shapes of MoE models
    anabranch bench ops experts --combine all    fused, ordered, unfused
    anabranch bench ops experts --zipf           some experts far more popular
    anabranch bench ops route --compile          against torch.compile

Calls alternate between several sets of weights, so that no cache holds them, and are replayed as one captured graph
where the platform has graphs. The first result is compared with a reference. The floor is the larger of the time to
move the bytes and the time to do the arithmetic, at rates measured on that machine (known: H200). Without an
accelerator: one tiny model, to see that everything runs.
"""

import argparse
import contextlib
import json
import math
import platform as host
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anabranch import kernels, ops, platforms
from anabranch.bench.op_cases import CASES, OP_OF, TINY, Case, Setting, shape
from anabranch.bench.records import TARGETS, commit, plot_file, pyplot
from anabranch.kernels.tuning.timing import microseconds
from anabranch.loader.load import DTYPES
from anabranch.ops.experts import COMBINES
from anabranch.options import at_least

SHAPE_OF = dict.fromkeys(("gdn_decode", "gdn_prefill"), "qwen3.6-35b-a3b")  # whatever model is asked for
SHAPE_OF |= dict.fromkeys(("latent_attention", "expanded_attention"), "deepseek-v2-lite")
SHORT = {"norm": "add_rms_norm", "rope": "rope_store", "activation": "gated_activation"}
CEILINGS = {"NVIDIA H200": (4.6e12, 777e12)}
"""Measured bytes per second of a read-only stream, and bf16 FLOP per second of a large matrix product."""
MODES = ("default", "reduce-overhead", "max-autotune")
COMPILED_TOKENS = (1, 2, 2048, 250_000)
ENOUGH_CALLS = 48
"""Calls in one captured graph: at this number, the time between two replays does not matter."""

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("ops", nargs="*", metavar="OP", help=f"{', '.join(CASES)}; also {', '.join(SHORT)} (default: all)")
    add("--models", nargs="+", metavar="NAME", help=f"some of {', '.join(TARGETS)}, tiny")
    add("--tokens", type=at_least(1), nargs="+", default=[], metavar="N", help="sizes to time (default: each op's own)")
    add("--dtype", default="bfloat16", choices=DTYPES, help="default bfloat16")
    add("--zipf", action="store_true", help="skewed routing")
    add("--combine", default="fastest", choices=[*COMBINES, "all"], help="how to sum experts' rows (default fastest)")
    add("--compile", action="store_true", help="route: also time eager torch and torch.compile (minutes)")
    add("--repeats", type=at_least(1), default=7, metavar="N", help="timings to take the median of (default 7)")
    add("--no-check", action="store_true", help="do not compare with the reference")
    add("--json", type=Path, metavar="FILE", help="write the figures to a file, after each one")
    add("--plot", type=Path, metavar="FILE", help="draw µs over size; needs matplotlib: pip install 'anabranch[plot]'")


def make_setting(options: argparse.Namespace) -> Setting:
    platform = platforms.current()
    kernels.bind(platform)
    usual = [TINY] if platform.device.type == "cpu" else list(TARGETS)
    for name in options.models or ():
        if name not in (*TARGETS, TINY):
            raise ValueError(f"--models: {name!r} is none of {', '.join((*TARGETS, TINY))}")
    return Setting(
        platform,
        tuple(map(shape, options.models or usual)),
        platform.compute_dtype(DTYPES[options.dtype]),
        tuple(options.tokens),
        options.zipf,
        COMBINES if options.combine == "all" else (options.combine,),
    )


def run(options: argparse.Namespace) -> int:
    wanted = [SHORT.get(name, name) for name in options.ops] or list(CASES)
    for name in wanted:
        if name not in CASES:
            raise ValueError(f"no benchmark of {name!r} (known: {', '.join((*CASES, *SHORT))})")
    setting = make_setting(options)
    if options.plot is not None:
        pyplot()
    compile_first(wanted, setting)
    rows: list[Row] = []
    wrong = 0
    for name in wanted:
        print(f"\n{name} on {setting.platform.describe()}\n{HEAD}", flush=True)
        with torch.inference_mode():
            for model in setting.models:
                for case in CASES[name](setting, model):
                    row = measure(name, model.name, case, setting, options)
                    if options.compile and name == "route":
                        row |= against(case, row, setting)
                    wrong += not row["right"]
                    rows.append(row)
                    print(shown(row), flush=True)
                    if options.json is not None:  # after each row, so that nothing measured is lost
                        options.json.parent.mkdir(parents=True, exist_ok=True)
                        options.json.write_text(json.dumps({**about(setting), "rows": rows}, indent=1))
    if options.plot is not None:
        plot(rows, options.plot)
    if wrong:
        print(f"\n{wrong} results differ from the reference", file=sys.stderr)
    return 1 if wrong else 0


def compile_first(wanted: list[str], setting: Setting) -> None:
    """Compile all kernels in parallel, instead of each at its first call."""
    if setting.platform.device.type == "cpu" or "triton" not in setting.platform.providers:
        return
    from anabranch.kernels.compiling.precompile import precompile, recording

    with contextlib.suppress(RuntimeError):  # what fails here fails again below, where the op is named
        with torch.inference_mode(), recording() as jobs:
            for name in wanted:
                for model in setting.models:
                    for case in CASES[name](setting, model):
                        case.calls(ops.OPS[OP_OF[name]])[0]()
        precompile(jobs)


def measure(name: str, model: str, case: Case, setting: Setting, options: argparse.Namespace) -> Row:
    op, error = ops.OPS[OP_OF[name]], math.nan
    calls = case.calls(op)
    if case.judged and not options.no_check:
        error = distance(calls[0](), case.calls(case.expected or op.reference)[0]())
    us, how = timed(calls, setting, options.repeats)
    bandwidth, flops = ceilings(setting)
    floor = 1e6 * max(case.num_bytes / bandwidth, case.flops / flops)
    serving = (kernel for kernel in op.bound if kernel.accepts is None or kernel.accepts(*case.given[0]))
    return {
        "op": name,
        "model": model if model == TINY else SHAPE_OF.get(name, model),
        "size": case.size,
        "label": case.label,
        "us": round(us, 3),
        "gb_s": round(case.num_bytes / us / 1e3, 1),
        "tflop_s": round(case.flops / us / 1e6, 2),
        "floor_us": round(floor, 3) if floor else None,
        "error": None if math.isnan(error) else error,
        "right": math.isnan(error) or error <= op.tolerance.get(setting.dtype, 1e-2),
        "kernel": next((str(kernel.provider) for kernel in serving), "reference"),
        "how": how,
        **case.more,
    }


def timed(calls: list[Callable[[], Any]], setting: Setting, repeats: int) -> tuple[float, str]:
    """µs of a call, and whether that was in a replayed graph or called from Python."""
    if setting.platform.has("graphs"):
        # A kernel that reads from the device cannot be captured.
        with contextlib.suppress(RuntimeError):
            many = calls * max(1, ENOUGH_CALLS // len(calls))
            return microseconds(setting.platform, many, repeats=repeats), "graph"
    return microseconds(setting.platform, calls, repeats=repeats, graph=False), "called"


def ceilings(setting: Setting) -> tuple[float, float]:
    """(bytes, FLOP) per second; infinite where nothing is known."""
    machine = setting.platform.describe()
    known = next((rates for name, rates in CEILINGS.items() if name in machine), (math.inf, math.inf))
    return known if setting.dtype.itemsize == 2 else (known[0], math.inf)


def distance(found: Any, expected: Any) -> float:
    """‖found − expected‖ / ‖expected‖, for integers the share that differs; the largest of several results."""
    if isinstance(expected, tuple):
        return max(distance(a, b) for a, b in zip(found, expected, strict=True))
    found = found[: expected.shape[0]]
    if not expected.is_floating_point():
        return (found != expected).float().mean().item()
    scale = expected.double().norm().item()
    error = (found.double() - expected.double()).norm().item()
    return error / scale if scale else error


def against(case: Case, row: Row, setting: Setting) -> Row:
    """How many times longer torch takes to route: replayed graph against replayed graph, calls against calls."""

    def times(function: Callable[..., Any], graph: bool = True) -> dict[str, float]:
        calls, platform = case.calls(function), setting.platform
        called = {"called": microseconds(platform, calls, repeats=3, graph=False)}
        return called | ({"graph": microseconds(platform, calls, repeats=3)} if graph else {})

    ours = {"graph": row["us"], **times(ops.route, graph=False)}
    others = {"eager": times(ops.route.reference)}
    for mode in MODES if case.size in (setting.tokens or COMPILED_TOKENS) else ():
        torch.compiler.reset()  # else shapes and modes together exceed the limit of recompilations
        try:  # all modes but the first use graphs of their own
            others[mode] = times(torch.compile(ops.route.reference, mode=mode), graph=mode == MODES[0])
        except Exception as error:  # a compiler may raise anything; the other figures are kept
            print(f"torch.compile {mode}: {type(error).__name__}: {error}"[:200], flush=True)
    ratios = {who: {how: us / ours[how] for how, us in found.items()} for who, found in others.items()}
    return {"called_us": ours["called"], "others_us": others, "ratios": ratios}


# -- showing -----------------------------------------------------------------------------------------------------------

HEAD = (
    f"{'model':<18}{'size':>8}  {'':<34}{'µs':>10}{'GB/s':>9}{'TFLOP/s':>9}{'floor':>9}{'%':>5}{'target':>8}"
    f"{'error':>9}  kernel"
)


def shown(row: Row) -> str:
    floor, target, error = row["floor_us"], row.get("target_us"), row["error"]
    line = f"{row['model']:<18}{row['size']:>8}  {row['label']:<34}{row['us']:>10.2f}{row['gb_s']:>9.0f}"
    line += f"{row['tflop_s']:>9.1f}" if row["tflop_s"] else f"{'':>9}"
    line += f"{floor:>9.2f}{100 * floor / row['us']:>5.0f}" if floor else f"{'-':>9}{'-':>5}"
    line += f"{target:>8g}" if target else f"{'':>8}"
    line += f"{error:>9.1e}" if error is not None else f"{'':>9}"
    line += f"  {row['kernel']}, {row['how']}{'' if row['right'] else '  WRONG'}"
    for who, how in row.get("ratios", {}).items():
        line += f"\n{'':>28}{who}: " + ", ".join(f"{ratio:.1f} × {kind}" for kind, ratio in how.items())
    return line


def about(setting: Setting) -> Row:
    accelerated = setting.platform.device.type != "cpu"
    return {
        "commit": commit(),
        "command": shlex.join(["anabranch", *sys.argv[1:]]),
        "machine": setting.platform.describe() if accelerated else f"{host.machine()}, {setting.platform.describe()}",
        "torch": torch.__version__,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "routing": "zipf" if setting.zipf else "uniform",
        "unit": "µs",
    }


def plot(rows: list[Row], file: Path) -> None:
    """One plot for each op: µs over size, a line for each model and label, and its floor dashed."""
    names = list(dict.fromkeys(row["op"] for row in rows))
    file.parent.mkdir(parents=True, exist_ok=True)
    with plot_file(file, len(names), 1, (9, 5 * len(names))) as axes:
        for name, axis in zip(names, axes[:, 0], strict=True):
            lines: dict[str, list[Row]] = {}
            for row in rows:
                if row["op"] == name:
                    lines.setdefault(f"{row['model']}, {row['label']}", []).append(row)
            for label, line in lines.items():
                sizes = [row["size"] for row in line]
                drawn = axis.plot(sizes, [row["us"] for row in line], marker="o", markersize=3, label=label)
                if all(row["floor_us"] for row in line):
                    floors = [row["floor_us"] for row in line]
                    axis.plot(sizes, floors, "--", linewidth=0.8, color=drawn[0].get_color())
            axis.set(title=name, xlabel="tokens or requests", ylabel="µs", xscale="log", yscale="log")
            axis.legend(fontsize=6)
