"""Sampling and what goes with it on a GPU: every token checked, every kernel timed, constants swept.

    PYTHONPATH=src:. python3 benchmarks/sample_sweep.py --json FILE               all of it, two minutes
    PYTHONPATH=src:. python3 benchmarks/sample_sweep.py --only check time
    TRITON_INTERPRET=1 PYTHONPATH=src:. python benchmarks/sample_sweep.py         tiny, without a GPU: does it run?

Parts: `check` (tokens that differ from the reference's, which must be none), `time` (rows × what they ask for),
`kernels` (the three kernels of a call, one by one), `sweep` (tiles, warps, numbers of programs), `others` (log
probabilities, penalties, masks, the input of a decode step).

µs per call in a replayed graph. Logits are the same in all calls: in a model they have just been written, so as much of
them is in L2 as fits. `flat` logits are 3 · randn; `peaked` ones have 200 likely tokens far above the others, as a
language model's. `mixed`: all kinds of rows in turn, beginning with top_k 20 and top_p 0.95.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anabranch import kernels, ops, platforms
from anabranch.kernels.compiling.precompile import precompile, recording
from anabranch.kernels.triton import decode_inputs, logprobs, mask_logits, penalize, sample
from anabranch.kernels.tuning.timing import microseconds
from anabranch.ops import SampleCall
from anabranch.ops.penalize import PenalizeCall
from tests.ops.sampling_rows import sampling_rows

TINY = not torch.cuda.is_available()
DEVICE = "cpu" if TINY else "cuda"
PARTS = ("check", "time", "kernels", "sweep", "others")
VOCABULARY = 300 if TINY else 151936
ROWS = (1,) if TINY else (1, 4, 16, 64, 256)
CHECKED = ((2, 300),) if TINY else ((4000, 50), (4000, 1003), (3000, 8200), (400, 32000), (128, 151936), (64, 262144))
AIMS = {("greedy", 1): 6, ("mixed", 1): 15, ("mixed", 256): 60}
READ_BYTES_PER_US = 4.6e6
"""A read-only stream on an H200, measured."""

ASKED: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (0.8, 0, 1.0, 0.0),
    "top_k 50": (0.8, 50, 1.0, 0.0),
    "top_p 0.9": (0.8, 0, 0.9, 0.0),
    "top_k 20, top_p 0.95": (0.8, 20, 0.95, 0.0),
    "min_p 0.05": (0.8, 0, 1.0, 0.05),
}
"""temperature, top_k, top_p, min_p"""
MIXED = ("top_k 20, top_p 0.95", "greedy", "top_p 0.9", "plain", "top_k 50", "min_p 0.05")
KINDS = ("greedy", "mixed") if TINY else (*ASKED, "mixed")
SWEPT: dict[str, list[Any]] = {
    "SCAN_WARPS": [2, 4, 8],
    "TILE": [1024, 2048, 4096],
    "NUM_SCANNING": [528, 1056, 2112],
    "GATHER_WARPS": [4, 8],
    "GATHER_TILE": [512, 1024, 2048],
    "NUM_GATHERING": [1024, 2048, 4096],
    "CHOOSE_WARPS": [4, 8, 16],
    "STEP": [512, 1024, 2048, 4096],
    "PIVOTS": [2, 4, 8],
}
"""One at a time; the shipped value among them."""

Arguments = dict[str, torch.Tensor]


def make_logits(rows: int, distribution: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    logits = 3 * torch.randn(rows, VOCABULARY, generator=generator)
    if distribution == "peaked":
        likely = torch.randint(VOCABULARY, (rows, 200), generator=generator)
        logits.scatter_add_(1, likely, torch.linspace(18, 2, 200).expand(rows, -1))
    return logits.to(DEVICE)


def make_arguments(rows: int, kind: str, distribution: str) -> Arguments:
    asked = [ASKED[MIXED[r % len(MIXED)] if kind == "mixed" else kind] for r in range(rows)]
    temperature, top_k, top_p, min_p = (torch.tensor(column, device=DEVICE) for column in zip(*asked))
    return {
        "logits_RV": make_logits(rows, distribution),
        "temperature_R": temperature.float(),
        "top_k_R": top_k.int(),
        "top_p_R": top_p.float(),
        "min_p_R": min_p.float(),
        "seed_R": torch.arange(rows, device=DEVICE),
        "position_R": torch.full((rows,), 7, device=DEVICE),
    }


def call(arguments: Arguments, kind: str) -> torch.Tensor:
    """What the engine would call: without truncation where all rows are greedy or exclude no token."""
    if kind in ("greedy", "plain"):
        names = ("logits_RV", "temperature_R", "seed_R", "position_R")
        return sample.sample(SampleCall(**{name: arguments[name] for name in names}))
    return sample.sample(SampleCall(**arguments))


def time_call(platform: platforms.Platform, arguments: Arguments, kind: str) -> float:
    return microseconds(platform, [lambda: call(arguments, kind)] * (1 if TINY else 10), repeats=1 if TINY else 7)


@contextmanager
def constant(name: str, value: Any) -> Iterator[None]:
    before = getattr(sample, name)
    setattr(sample, name, value)
    yield
    setattr(sample, name, before)


# ---------------------------------------------------------------------------------------------------------------------


def check() -> list[dict[str, int]]:
    found = []
    generator = torch.Generator().manual_seed(0)
    for rows, vocabulary in CHECKED:
        differing = 0
        for begin in range(0, rows, 500):
            part = sampling_rows(min(500, rows - begin), vocabulary, generator)
            part = {name: value.to(DEVICE) for name, value in part.items()}
            differing += int((sample.sample(SampleCall(**part)) != ops.sample.reference(SampleCall(**part))).sum())
        found.append({"rows": rows, "vocabulary": vocabulary, "differing": differing})
        print(f"check: {differing} of {rows} tokens differ, V {vocabulary}", flush=True)
    return found


def compare_tokens(arguments: Arguments, label: str) -> None:
    for begin in range(0, arguments["logits_RV"].shape[0], 64):  # the reference takes 50 bytes for a logit
        part = {name: value[begin : begin + 64] for name, value in arguments.items()}
        assert torch.equal(sample.sample(SampleCall(**part)), ops.sample.reference(SampleCall(**part))), (
            f"{label}: other tokens"
        )


def time_all(platform: platforms.Platform) -> list[dict[str, Any]]:
    results = []
    print(f"{'time':<24}{'':>8}" + "".join(f"{rows:>9}" for rows in ROWS))
    read = "".join(f"{rows * VOCABULARY * 4 / READ_BYTES_PER_US:>9.1f}" for rows in ROWS)
    print(f"{'logits read once':<24}{'':>8}{read}")
    for kind in KINDS:
        for distribution in ("peaked",) if TINY else ("flat", "peaked"):
            times = []
            for rows in ROWS:
                arguments = make_arguments(rows, kind, distribution)
                compare_tokens(arguments, f"{kind}, {distribution}, {rows} rows")
                times.append(time_call(platform, arguments, kind))
                aim = AIMS.get((kind, rows))
                results.append({"kind": kind, "logits": distribution, "rows": rows, "us": times[-1], "aim": aim})
            print(f"{kind:<24}{distribution:>8}" + "".join(f"{us:>9.1f}" for us in times), flush=True)
    for rows in ROWS:
        logits = make_logits(rows, "flat")
        us = microseconds(platform, [lambda: logits.argmax(-1)] * (1 if TINY else 10))  # noqa: B023
        results.append({"kind": "torch argmax", "logits": "flat", "rows": rows, "us": us, "aim": None})
    print(f"{'torch argmax':<32}" + "".join(f"{entry['us']:>9.1f}" for entry in results[-len(ROWS) :]), flush=True)
    return results


def time_kernels() -> list[dict[str, Any]]:
    """By the profiler, in calls one after the other."""
    results: list[dict[str, Any]] = []
    if TINY:
        return results
    for kind in ("plain", "top_p 0.9", "top_k 20, top_p 0.95", "mixed"):
        for rows in (ROWS[0], ROWS[-1]):
            arguments = make_arguments(rows, kind, "flat")
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                for _ in range(20):
                    call(arguments, kind)
                torch.cuda.synchronize()
            times = {event.key: event.device_time_total / 20 for event in profile.key_averages()}
            results.append({"kind": kind, "rows": rows, "us": times})
            told = ", ".join(f"{name} {us:.1f}" for name, us in times.items() if us)
            print(f"kernels: {kind}, {rows} rows: {told}", flush=True)
    return results


def sweep(platform: platforms.Platform) -> list[dict[str, Any]]:
    batches = {
        (kind, rows): make_arguments(rows, kind, "flat")
        for kind in ("greedy", "plain", "top_p 0.9", "mixed")
        for rows in (ROWS[0], ROWS[-1])
    }
    variants = [(name, value) for name, values in SWEPT.items() for value in values]
    if TINY:
        batches, variants = {("plain", 1): batches["plain", 1]}, variants[:2]
    if not TINY:
        with recording() as jobs:
            for name, value in variants:
                with constant(name, value):
                    for (kind, _), arguments in batches.items():
                        call(arguments, kind)
        failed = precompile(jobs)
        print(f"sweep: {len(jobs)} kernels, {len(failed)} failed", flush=True)
    results = []
    for name, value in variants:
        with constant(name, value):
            times = {f"{kind}, {rows}": time_call(platform, batch, kind) for (kind, rows), batch in batches.items()}
        results.append({"constant": name, "value": value, "us": times})
        told = ", ".join(f"{label}: {us:.1f}" for label, us in times.items())
        print(f"sweep: {name} = {value}: {told}", flush=True)
    return results


def time_others(platform: platforms.Platform) -> list[dict[str, Any]]:
    results = []
    for rows in {ROWS[0], ROWS[-1]}:
        logits = make_logits(rows, "flat")
        token = torch.randint(VOCABULARY, (rows,), device=DEVICE)
        row = torch.arange(rows, device=DEVICE)
        count = torch.randint(2, (rows, VOCABULARY), dtype=torch.int32, device=DEVICE)
        amounts = [torch.ones(rows, device=DEVICE) for _ in range(3)]
        words = torch.full((rows, (VOCABULARY + 31) // 32), -2, dtype=torch.int32, device=DEVICE)
        packed = torch.stack([row, torch.full_like(row, -1), torch.full_like(row, 1000)]).int()
        table = torch.zeros(rows, 1024, dtype=torch.int32, device=DEVICE)
        calls = {
            "logprobs, top 0": lambda: logprobs.logprobs(logits, token, 0),  # noqa: B023
            "logprobs, top 20": lambda: logprobs.logprobs(logits, token, 20),  # noqa: B023
            "penalize": lambda: penalize.penalize(
                PenalizeCall(logits, row, count, count != 0, row, *amounts)  # noqa: B023
            ),
            "mask_logits": lambda: mask_logits.mask_logits(logits, row, words),  # noqa: B023
            "decode_inputs": lambda: decode_inputs.decode_inputs(packed, token),  # noqa: B023
            "decode_pages": lambda: decode_inputs.decode_pages(packed, table, 16, 1024),  # noqa: B023
        }
        for name, function in calls.items():
            us = microseconds(platform, [function] * (1 if TINY else 10), repeats=1 if TINY else 7)
            results.append({"op": name, "rows": rows, "us": us})
            print(f"others: {name}, {rows} rows: {us:.1f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    platform = platforms.make("cpu") if TINY else platforms.current()
    kernels.bind(platform)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "commit": commit,
        "machine": "no GPU" if TINY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "vocabulary": VOCABULARY,
        "unit": "µs",
    }
    parts: dict[str, Any] = {
        "check": check,
        "time": lambda: time_all(platform),
        "kernels": time_kernels,
        "sweep": lambda: sweep(platform),
        "others": lambda: time_others(platform),
    }
    for part in options.only:
        report[part] = parts[part]()
        if options.json:  # what is done is kept, whatever happens next
            with open(options.json, "w") as file:
                json.dump(report, file, indent=1)
    wrong = sum(entry["differing"] for entry in report.get("check", []))
    if wrong:
        raise SystemExit(f"{wrong} tokens differ from the reference's")


if __name__ == "__main__":
    main()
