"""Load on a server that speaks OpenAI's API, ours or another's, and how it answers: TTFT, TPOT, ITL, E2EL, throughput.

    anabranch bench serve --base-url http://127.0.0.1:8000 --num-prompts 200 --request-rate 4
    anabranch bench serve --base-url URL --max-concurrency 64 --dataset prompts.jsonl --json r.json --plot r.svg

Requests stream. They arrive at random (Poisson) --request-rate a second, or as soon as --max-concurrency lets them.
TTFT: to the first piece of an answer. TPOT: (E2EL − TTFT) / (tokens − 1) of each answer. ITL: between two pieces of an
answer. The JSON file has the names that vLLM's serving benchmark writes. Ctrl-C ends early and shows what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import math
import os
import platform
import random
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.bench.offline import commit
from anabranch.bench.report import pyplot
from anabranch.engine.progress import Counter
from anabranch.ranges import at_least, between

if TYPE_CHECKING:
    from anabranch.bench.serve_client import Client, Sent
    from anabranch.bench.serve_prompts import Prompt

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MANY_DESCRIPTORS = 65536


def add_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("whom to ask")
    where.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="with or without /v1")
    where.add_argument("--model", metavar="NAME", help="default: the first the server names")
    where.add_argument("--endpoint", default="completions", choices=sorted(PATHS))
    where.add_argument("--api-key", metavar="KEY", help="default: ANABRANCH_API_KEY or OPENAI_API_KEY")
    what = parser.add_argument_group("what to ask")
    what.add_argument("--dataset", default="random", metavar="random|FILE", help="JSON lines with prompt or messages")
    what.add_argument("--num-prompts", type=int, default=100, metavar="N")
    what.add_argument("--random-input-len", type=at_least(1), default=512, metavar="N", help="tokens")
    what.add_argument("--random-output-len", type=at_least(1), default=128, metavar="N", help="tokens; for files too")
    what.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths within ±R")
    what.add_argument(
        "--random-prefix-len", type=at_least(0), default=0, metavar="N", help="tokens all prompts begin with"
    )
    what.add_argument("--temperature", type=between(0, 100), default=0.0, metavar="T")
    what.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help="default: with random prompts")
    what.add_argument("--extra-body", type=fields, default={}, metavar="JSON", help="more fields of every request")
    when = parser.add_argument_group("when")
    when.add_argument("--request-rate", type=float, default=math.inf, metavar="R", help="a second; inf: all at once")
    when.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1: Poisson; less comes in bursts")
    when.add_argument("--max-concurrency", type=int, metavar="N", help="requests that run at once")
    when.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before, not counted")
    when.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one request")
    when.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals")
    out = parser.add_argument_group("results")
    out.add_argument("--json", metavar="FILE")
    out.add_argument("--detailed", action="store_true", help="each request's own times in the JSON file too")
    out.add_argument("--plot", metavar="FILE", help="distributions and course (svg, png, pdf); needs matplotlib")


def fields(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def run(options: argparse.Namespace) -> int:
    for package in ("h11", "msgspec"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"bench serve needs the package {package}; run: pip install {package}")
    if options.plot:
        pyplot()  # refuses before anything runs
    for name, least in {"num_prompts": 1, "max_concurrency": 1, "num_warmups": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
    for name in ("request_rate", "burstiness", "timeout"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0, not {getattr(options, name):g}")
    _allow_descriptors()
    return asyncio.run(bench(options))


def _allow_descriptors() -> None:
    """A connection each: the usual limit of 1024 is soon met."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MANY_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


async def bench(options: argparse.Namespace) -> int:
    from anabranch.bench import serve_figures
    from anabranch.bench.serve_client import Client

    environment = os.environ.get("ANABRANCH_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    client = Client(options.base_url, options.api_key or environment)
    model = options.model or await first_model(client)
    load = Load(client, options, model, await prompts(client, model, options))
    await load.warm_up()
    stopped = await load.run()
    client.close()
    if not load.done:
        raise ValueError("stopped before any request had ended: nothing was measured")
    found = about(options, model) | serve_figures.figures(load.done, load.duration, load.cpu_seconds)
    print(serve_figures.table(found, load.done))
    if stopped:
        found["interrupted"] = True
        print(f"stopped    after {len(load.done):,} of {options.num_prompts:,} requests; those in flight do not count")
    if options.json:
        values = found | (serve_figures.details(load.done) if options.detailed else {})
        Path(options.json).write_text(json.dumps(values, indent=1) + "\n")
    if options.plot and found["completed"]:
        serve_figures.plot(load.done, f"{model}: {found['output_throughput']:,.0f} tokens a second", options.plot)
    return 130 if stopped else 0 if found["completed"] else 1


async def first_model(client: Client) -> str:
    from anabranch.bench.serve_client import Refused

    try:
        return str((await client.json("GET", "/v1/models"))["data"][0]["id"])
    except (Refused, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"the server does not say which models it has ({error}); name one with --model") from None


async def prompts(client: Client, model: str, options: argparse.Namespace) -> list[Prompt]:
    """Those of the warm-up first."""
    from anabranch.bench.serve_prompts import Lengths, file_prompts, random_prompts

    num = options.num_prompts + options.num_warmups
    if options.dataset != "random":
        return file_prompts(Path(options.dataset), options.endpoint, num, options.random_output_len)
    lengths = Lengths(
        input=options.random_input_len,
        output=options.random_output_len,
        prefix=options.random_prefix_len,
        range_ratio=options.random_range_ratio,
    )
    return await random_prompts(client, model, options.endpoint, num, lengths, options.seed)


def about(options: argparse.Namespace, model: str) -> dict[str, Any]:
    command = [word for word in sys.argv[1:] if word != options.api_key]
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai-chat" if options.endpoint == "chat" else "openai",
        "model_id": model,
        "num_prompts": options.num_prompts,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "dataset": options.dataset,
        "seed": options.seed,
        "commit": commit(),
        "command": f"anabranch {shlex.join(command)}",
        "client_machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


class Load:
    """Requests on their way: when they start, how many at once, what became of them."""

    def __init__(self, client: Client, options: argparse.Namespace, model: str, prompts: list[Prompt]) -> None:
        self.client, self.options, self.model = client, options, model
        self.warm_ups, self.prompts = prompts[: options.num_warmups], prompts[options.num_warmups :]
        self.done: list[Sent] = []
        self.places = asyncio.Semaphore(options.max_concurrency or len(prompts))
        self.progress = Counter("requests", options.num_prompts)
        self.duration = self.cpu_seconds = 0.0

    def body(self, prompt: Prompt) -> bytes:
        body = {"model": self.model, **prompt.fields, "max_tokens": prompt.num_output}
        body |= {"temperature": self.options.temperature, "stream": True, "stream_options": {"include_usage": True}}
        ignore_eos = self.options.ignore_eos
        if self.options.dataset == "random" if ignore_eos is None else ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | self.options.extra_body).encode()

    async def warm_up(self) -> None:
        for prompt in self.warm_ups:
            sent = await self.send(self.body(prompt), prompt)
            if sent.error:
                raise ValueError(f"the first request failed, so none was measured: {sent.error}")

    async def run(self) -> bool:
        """All of them; True if Ctrl-C ended it."""
        bodies = [self.body(prompt) for prompt in self.prompts]
        began, cpu_began = time.perf_counter(), time.process_time()
        stopped = False
        try:
            await self.arrive(bodies)
        except asyncio.CancelledError:  # asyncio.run's answer to SIGINT
            stopped = True
        self.duration, self.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        self.done.sort(key=lambda sent: sent.started)
        self.progress.clear()
        return stopped

    async def arrive(self, bodies: list[bytes]) -> None:
        rng = random.Random(self.options.seed)
        rate, burstiness = self.options.request_rate, self.options.burstiness
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body, prompt in zip(bodies, self.prompts, strict=True):
                group.create_task(self.one(body, prompt))
                if not math.isinf(rate):
                    # Intervals add up from the beginning: a late wake-up does not slow the arrivals that follow.
                    due += rng.gammavariate(burstiness, 1 / (rate * burstiness))
                    await asyncio.sleep(due - time.perf_counter())

    async def one(self, body: bytes, prompt: Prompt) -> None:
        arrived = time.perf_counter()
        async with self.places:
            waited = time.perf_counter() - arrived
            sent = await self.send(body, prompt)
        sent.waited = waited
        self.done.append(sent)
        self.progress(len(self.done), sent.num_output)

    async def send(self, body: bytes, prompt: Prompt) -> Sent:
        from anabranch.bench.serve_client import Sent

        sent = Sent(num_input=prompt.num_input)
        try:
            async with asyncio.timeout(self.options.timeout):
                await self.client.stream(PATHS[self.options.endpoint], body, sent)
        except TimeoutError:
            sent.error = f"no whole answer within {self.options.timeout:g} s"
        return sent
