"""Prove a property on this machine. determinism: with --deterministic, requests of a model get the same tokens and log
probabilities, to the bit, alone, in a batch, in chunks, with a cached prefix, after preemption and with drafts."""

import argparse
import time

from anabranch import bundled
from anabranch.options import add_engine_options, engine_fields


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=("determinism",), help="determinism")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=bundled.HELP)
    add_engine_options(parser, "dtype", "load_format", "quantization", "kv_cache_dtype", "state_dtype")


def run(options: argparse.Namespace) -> int:
    from anabranch import platforms
    from anabranch.conformance.determinism import check_determinism

    platform, begin, wrong = platforms.current(), time.perf_counter(), 0
    print(f"{options.model or 'the bundled model'} on {platform.name}: {platform.describe()}\n")
    for result in check_determinism(options.model, **engine_fields(options)):
        print(f"  {result.name:<30} {result.what:<30} {'same bits' if result.passed else 'FAILED'}", flush=True)
        for fault in result.faults:
            print(f"      {fault}")
        wrong += not result.passed
    verdict = "deterministic" if not wrong else f"not proven: {wrong} of the above failed"
    print(f"\n{verdict} ({time.perf_counter() - begin:.0f} s)")
    return 1 if wrong else 0
