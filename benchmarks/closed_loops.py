"""Values of one option of `anabranch serve`, each under the same load: N requests at a time, for several N, and with
--rates as many a second, for several rates.

    python benchmarks/closed_loops.py qwen3.6-35b-a3b --vary shared-expert stream inline --json FILE
    python benchmarks/closed_loops.py qwen3-30b-a3b --vary kv-cache-dtype auto fp8_e4m3 --input 8192
    python benchmarks/closed_loops.py FOLDER --vary speculative none ngram mtp --load "--dataset FILE"
    python benchmarks/closed_loops.py FOLDER --vary shared-expert stream inline --loops 1 4 --input 8 --output 8
    python benchmarks/closed_loops.py qwen3-30b-a3b --vary graphs full pieces compiled --loops --rates 4 16
    python benchmarks/closed_loops.py gemma4-26b-a4b --vary ANABRANCH_KERNELS "" route=reference --rates 16

What is varied is an option or, in capitals, a variable of the server's environment.

A model is a config that comes with `bench offline`, with random weights and a tokenizer of words, or a folder. A server
is started for each value, one after another; `anabranch bench serve` puts the load on it, and its figures are kept
whole. Random weights tell nothing about drafts: whether these are right depends on the model and on the text.

Prompts are not found in the prefix cache: each loop has a seed of its own, the same for every value, and warm-ups are
further prompts of that seed. Options of --load and --serve come last, so that they decide: with `--load "--seed 0"`
loops repeat the prompts of the loop before, with `--load "--random-prefix-len N"` all begin alike. Prompts of a file
are repeated, in each loop from the first on: `--serve=--no-prefix-cache` computes them each time. `prefix_hits` in the
JSON file is the number of tokens found, warm-ups included.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from anabranch.bench.records import CONFIGS, commit
from anabranch.bench.serve_load import WORDS

COMMAND = [sys.executable, "-m", "anabranch"]
PATIENCE = 600
"""Seconds for a start."""


@contextmanager
def served(arguments: list[str], more: dict[str, str]) -> Iterator[str]:
    """The URL of a server that is ready; its log is shown if it never is. `more`: of its environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        command = [*COMMAND, "serve", *arguments, "--port", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **more})
        try:
            end = time.monotonic() + PATIENCE
            while not ready(url):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    sys.exit(f"the server did not start:\n{log.read()[-4000:]}")
                time.sleep(0.2)
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def stats(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/debug/stats", timeout=30) as answer:
        return dict(json.load(answer))


def load(url: str, kind: list[str], seed: int, options: argparse.Namespace, file: Path) -> dict[str, Any]:
    """`kind`: the options that say how many requests there are, and when."""
    command = [*COMMAND, "bench", "serve", "--base-url", url, *kind, "--seed", str(seed), "--json", str(file)]
    command += ["--random-input-len", str(options.input), "--random-output-len", str(options.output)]
    before = stats(url)
    done = subprocess.run([*command, *shlex.split(options.load)], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    after = stats(url)
    found = dict(json.loads(file.read_text()))
    names = ("spec_decode_draft_tokens", "spec_decode_accepted_tokens", "prefix_hits")
    drafts, right, found["prefix_hits"] = (after.get(name, 0) - before.get(name, 0) for name in names)
    return found | ({"draft_tokens": drafts, "acceptance": right / drafts} if drafts else {})


def row(found: dict[str, Any]) -> str:
    share = f"{found['acceptance']:7.0%}" if "acceptance" in found else ""
    return (
        f"{found['output_throughput']:10,.0f} {found['median_ttft_ms']:10.1f} {found['median_tpot_ms']:10.2f} "
        f"{found['p99_itl_ms']:10.2f} {found['failed']:7}{share}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--vary", nargs="+", required=True, metavar="X", help="an option without --, then its values")
    parser.add_argument("--loops", type=int, nargs="*", default=[1, 4, 16, 64, 256], metavar="N", help="at a time")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="requests for each place (default 3)")
    parser.add_argument("--rates", type=float, nargs="*", default=[], metavar="R", help="requests a second, as well")
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="at each rate (default 500)")
    parser.add_argument("--input", type=int, default=512, metavar="N", help="tokens of a prompt (default 512)")
    parser.add_argument("--output", type=int, default=128, metavar="N", help="tokens of an answer (default 128)")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more for `anabranch serve`")
    parser.add_argument("--load", default="", metavar="OPTIONS", help="more for `anabranch bench serve`")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    name, *values = options.vary
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    kinds: dict[str, list[str]] = {}
    for at_once in options.loops:
        number, warm = options.rounds * at_once, min(2, options.rounds) * at_once
        kinds[str(at_once)] = [
            "--max-concurrency",
            str(at_once),
            "--num-prompts",
            str(number),
            "--num-warmups",
            str(warm),
        ]
    for rate in options.rates:
        kinds[f"{rate:g}/s"] = ["--request-rate", str(rate), "--num-prompts", str(options.requests)]
        kinds[f"{rate:g}/s"] += ["--num-warmups", str(min(16, options.requests))]
    about = {"model": options.model, "commit": commit(), "vary": name, "command": shlex.join(sys.argv), "rows": rows}
    with tempfile.TemporaryDirectory() as made:
        folder, more = options.model, shlex.split(options.serve)
        if not Path(folder).is_dir():
            # As a script this file lies beside the other; as a module both are in a package.
            from serve_load import write_tokenizer  # type: ignore[import-not-found]

            folder, more = f"{made}/{options.model}", ["--load-format", "dummy", *more]
            write_tokenizer(Path(folder), CONFIGS / options.model / "config.json", WORDS)
        print(f"{name:>16} {'at once':>8} {'out tok/s':>10} {'TTFT ms':>10} {'TPOT ms':>10} {'p99 ITL':>10}  failed")
        for value in values:
            rows[value] = {}
            most = [] if options.rates else ["--max-num-seqs", str(max(options.loops))]
            varied = {name: value} if name.isupper() else {}
            with served([folder, *([] if varied else [f"--{name}", value]), *most, *more], varied) as url:
                for seed, (at_once, kind) in enumerate(kinds.items()):
                    rows[value][at_once] = load(url, kind, seed, options, Path(made) / "figures.json")
                    print(f"{value:>16} {at_once:>8} {row(rows[value][at_once])}", flush=True)
                    if options.json is not None:
                        options.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
