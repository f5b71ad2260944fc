"""Put load on a server with OpenAI's API, ours or another, and measure TTFT, TPOT, ITL, E2EL and throughput.

    anabranch bench serve --base-url URL --num-prompts 200 --request-rate 4
    anabranch bench serve --max-concurrency 64 --dataset FILE --plot r.svg

Answers are streamed. Requests arrive at random (Poisson), --request-rate per second, or as soon as --max-concurrency
allows. TTFT: time to the first piece of an answer. TPOT: (E2EL − TTFT) / (tokens − 1) of each answer. ITL: time between
two pieces of an answer. E2EL: time to its end. The JSON file has the keys of vLLM's serving benchmark. Ctrl-C ends
early and shows what was measured.
"""

import argparse
import asyncio
import contextlib
import json
import math
from typing import Any

from anabranch.bench.records import PLOT_NEEDS, pyplot
from anabranch.options import at_least, between

MANY_DESCRIPTORS = 65536


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the server").add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="with or without /v1 (default %(default)s)")
    add("--model", metavar="NAME", help="default: the first model the server lists")
    add("--endpoint", default="completions", choices=["chat", "completions"], help="default %(default)s")
    add("--api-key", metavar="KEY", help="default: ANABRANCH_API_KEY or OPENAI_API_KEY")
    add = parser.add_argument_group("the requests").add_argument
    add("--dataset", default="random", metavar="random|FILE", help="JSON lines with prompt or messages")
    add("--num-prompts", type=int, default=100, metavar="N", help="requests to send (default 100)")
    add("--random-input-len", type=at_least(1), default=512, metavar="N", help="tokens of a prompt (default 512)")
    output = "tokens of an answer, for files too (default 128)"
    add("--random-output-len", type=at_least(1), default=128, metavar="N", help=output)
    add("--random-range-ratio", type=float, default=0.0, metavar="R", help="vary lengths by up to ±R, below 1")
    prefix = "tokens that all prompts begin with"
    add("--random-prefix-len", type=at_least(0), default=0, metavar="N", help=prefix)
    add("--temperature", type=between(0, 100), default=0.0, metavar="T", help="default 0: greedy")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help="default: only for random prompts")
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of every request")
    add = parser.add_argument_group("the load").add_argument
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second; inf: all at once")
    add("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less: in bursts")
    add("--max-concurrency", type=int, metavar="N", help="requests that run at once (default: no limit)")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests to send first and not count (default 1)")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for one request (default 600)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default 0)")
    add = parser.add_argument_group("results").add_argument
    add("--json", metavar="FILE", help="write the figures to a file")
    add("--detailed", action="store_true", help="write each request's times to the JSON file too")
    add("--plot", metavar="FILE", help=f"draw distributions and time lines (svg, png, pdf); {PLOT_NEEDS}")


def json_object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def run(options: argparse.Namespace) -> int:
    try:
        from anabranch.bench.serve_load import bench
    except ImportError as error:
        raise ValueError(f"bench serve needs the package {error.name}; run: pip install {error.name}") from None
    if options.plot:
        pyplot()  # raises before anything is sent
    for name, least in {"num_prompts": 1, "max_concurrency": 1, "num_warmups": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0, not {getattr(options, name):g}")
    if not 0 <= options.random_range_ratio < 1:
        raise ValueError(f"--random-range-ratio must lie in [0, 1), not {options.random_range_ratio:g}")
    _allow_descriptors()
    return asyncio.run(bench(options))


def _allow_descriptors() -> None:
    """Raise the limit of open files: every request has a connection, and the usual limit is 1024."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
