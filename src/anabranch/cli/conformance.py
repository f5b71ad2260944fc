"""Test whether a platform computes correctly: every op × kernel × sample, a tiny model of each family, streams, copies
and graphs, compared with references on the CPU. Prints a line for each; the exit code is 1 if anything is wrong."""

import argparse
import json
import time
from dataclasses import asdict

from anabranch.cli.doctor import find_platform


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", metavar="NAME", help="the platform to test (default: the detected one)")
    parser.add_argument(
        "--only", choices=("contract", "ops", "models"), action="append", help="test this section; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")


def run(options: argparse.Namespace) -> int:
    from anabranch import conformance

    platform, device = find_platform(options.platform)
    if not options.json:
        print(f"{platform.name}: {device}\n")
    begin, results = time.perf_counter(), []
    for result in conformance.conformance(platform, options.only or conformance.SECTIONS):
        results.append(result)
        if options.json:
            print(json.dumps(asdict(result) | {"passed": result.passed}), flush=True)
            continue
        verdict = "–" if result.absent else "ok" if result.passed else "WRONG"
        print(f"  {result.section:<9} {result.name:<18} {result.what:<32} {verdict}", flush=True)
        for fault in result.faults:
            print(f"            {fault[:400]}")
    wrong = [result for result in results if not result.passed]
    if not options.json:
        seconds = time.perf_counter() - begin
        count = f"{len(results) - len(wrong)} of {len(results)} as they must be"
        print(f"\n{platform.name} {'conforms' if not wrong else 'does not conform'}: {count}, {seconds:.0f} s")
    return 1 if wrong else 0
