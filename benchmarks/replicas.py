"""Share of prompt tokens found in the prefix caches of replicas, with requests routed by prefix and by load.

    PYTHONPATH=src python benchmarks/replicas.py --json FILE

Conversations of the same few beginnings, in random order, `--concurrency` at once, against `anabranch serve --replicas`
on the bundled model or the one given. The first request with a beginning computes it, on each replica that gets one.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from anabranch.bench.records import commit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--replicas", type=int, default=2, metavar="N")
    parser.add_argument("--beginnings", type=int, default=32, metavar="N")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="with each beginning")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N")
    parser.add_argument("--port", type=int, default=8123, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = {routing: measure(options, routing) for routing in ("prefix", "load")}
    for routing, row in rows.items():
        requests = " + ".join(f"{number:.0f}" for number in row["requests"])
        print(f"{routing:8} hit rate {row['hit_rate']:.3f}, requests {requests}, {row['seconds']:.1f} s")
    record = {"command": " ".join(sys.argv), "commit": commit(), "options": vars(options) | {"json": None}}
    record["rows"] = rows
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(options: argparse.Namespace, routing: str) -> dict[str, Any]:
    rng, url = random.Random(0), f"http://127.0.0.1:{options.port}"
    beginnings = [[rng.randrange(10, 1000) for _ in range(256)] for _ in range(options.beginnings)]
    prompts = [
        beginning + [rng.randrange(10, 1000) for _ in range(20)]
        for beginning in beginnings
        for _ in range(options.requests)
    ]
    rng.shuffle(prompts)
    command = [sys.executable, "-m", "anabranch.cli.main", "serve", *([options.model] if options.model else [])]
    command += ["--replicas", str(options.replicas), "--routing", routing, "--port", str(options.port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ask(prompt: list[int]) -> None:
        body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        urllib.request.urlopen(request).read()

    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health/ready").read()
                break
            except OSError:
                assert server.poll() is None, "the server has ended"
                time.sleep(0.5)
        began = time.monotonic()
        with ThreadPoolExecutor(options.concurrency) as threads:
            list(threads.map(ask, prompts))
        seconds = time.monotonic() - began
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()

    def values(name: str) -> list[float]:
        return list(map(float, re.findall(rf"anabranch_{name}_total{{.*replica=.*}} (.+)", metrics)))

    hits, queries = sum(values("prefix_cache_hits")), sum(values("prefix_cache_queries"))
    return {"hit_rate": hits / queries, "requests": values("request_success"), "seconds": seconds}


if __name__ == "__main__":
    main()
