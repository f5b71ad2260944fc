"""The load of `bench serve`: random prompts or those of a file, sent when they are due.

Random prompts have exactly the given lengths where the server tokenises (/tokenize, as Anabranch and vLLM have it) and
takes token ids; elsewhere they are text of about that length, and the count that the server reports is used.
"""

import argparse
import asyncio
import json
import math
import os
import random
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.bench import serve_figures
from anabranch.bench.records import commit, host_machine
from anabranch.bench.serve_client import Client, Refused, Sent
from anabranch.engine.progress import Counter

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TEXT = """
river water stone bridge valley mountain winter summer morning evening small large quiet early open narrow cold warm
walk carry follow divide gather return begin leave build answer question letter number table window garden forest
field road village city music silence paper colour light shadow friend child teacher sailor market harbour island
between under across behind before after toward around because although whenever slowly often never always almost
"""
WORDS = TEXT.split()
TOKENS_PER_WORD = 1.3  # if the server does not tokenise: about what large vocabularies need for English


async def bench(options: argparse.Namespace) -> int:
    """Send all requests, show the figures and write the files; returns the exit code."""
    environment = os.environ.get("ANABRANCH_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    client = Client(options.base_url, options.api_key or environment)
    model = options.model or await first_model(client)
    num = options.num_prompts + options.num_warmups
    if options.dataset == "random":
        prompts = await random_prompts(client, model, num, options)
    else:
        prompts = file_prompts(Path(options.dataset), options.endpoint, num, options.random_output_len)
    load = Load(client, options, model, prompts)
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
    try:
        return str((await client.json("GET", "/v1/models"))["data"][0]["id"])
    except (Refused, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"the server does not list its models ({error}); name one with --model") from None


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
        "client_machine": host_machine(),
    }


# -- prompts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    fields: dict[str, Any]
    """`prompt` or `messages` of the request's body."""
    num_output: int
    num_input: int = 0
    """The intended number of tokens; the server's count replaces it."""


async def random_prompts(client: Client, model: str, num: int, options: argparse.Namespace) -> list[Prompt]:
    rng, ratio = random.Random(options.seed), options.random_range_ratio
    known = await _token_ids(client, model)
    if len(set(known)) == 1:
        what = "the words of random prompts are one and the same token to the server, so all prompts would be equal"
        raise ValueError(f"{what}; give others with --dataset FILE")
    ids = sorted(set(known)) if options.endpoint == "completions" else []
    per_word = len(known) / len(WORDS) if known else TOKENS_PER_WORD

    def vary(length: int) -> int:
        return max(1, rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))

    def draw(count: int) -> list[Any]:
        return rng.choices(ids, k=count) if ids else rng.choices(WORDS, k=max(1, round(count / per_word)))

    prefix = draw(options.random_prefix_len) if options.random_prefix_len else []
    made = []
    for _ in range(num):
        num_input = vary(options.random_input_len)
        parts = prefix + draw(num_input)
        fields = _fields(options.endpoint, parts if ids else " ".join(parts))
        made.append(Prompt(fields, vary(options.random_output_len), num_input + options.random_prefix_len))
    return made


async def _token_ids(client: Client, model: str) -> list[int]:
    """The token ids of WORDS in the server's vocabulary; empty if the server does not tokenise."""
    body = {"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False}
    try:
        found = await client.json("POST", "/tokenize", body)
        return [token for token in found["tokens"] if isinstance(token, int)]
    except (Refused, ValueError, KeyError, TypeError):
        return []


def file_prompts(file: Path, endpoint: str, num: int, num_output: int) -> list[Prompt]:
    """One JSON object a line: `prompt` or `messages`, perhaps `max_tokens`. Too few are repeated."""
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if line.strip():
            found.append(_read(f"{file}, line {number}", line, endpoint, num_output))
    if not found:
        raise ValueError(f"{file} is empty: give one JSON object a line, with `prompt` or `messages`")
    return [found[i % len(found)] for i in range(num)]


def _read(where: str, line: str, endpoint: str, num_output: int) -> Prompt:
    try:
        given = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise ValueError(f"{where}: give an object with `prompt` or `messages`, one of them")
    wanted = given.get("max_tokens", num_output)
    if not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"{where}: max_tokens must be an integer from 1 on, not {wanted!r}")
    if "messages" in given and endpoint != "chat":
        raise ValueError(f"{where}: `messages` are for --endpoint chat")
    fields = {"messages": given["messages"]} if "messages" in given else _fields(endpoint, given["prompt"])
    return Prompt(fields, wanted)


def _fields(endpoint: str, prompt: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt}


# -- sending -----------------------------------------------------------------------------------------------------------


class Load:
    """Starts requests when they are due, limits how many run at once, and keeps what became of them."""

    def __init__(self, client: Client, options: argparse.Namespace, model: str, prompts: list[Prompt]) -> None:
        self.client, self.options, self.model = client, options, model
        self.warm_ups, self.prompts = prompts[: options.num_warmups], prompts[options.num_warmups :]
        self.done: list[Sent] = []
        self.places = asyncio.Semaphore(options.max_concurrency or len(prompts))
        self.duration = self.cpu_seconds = 0.0

    def body(self, prompt: Prompt) -> bytes:
        body = {"model": self.model, **prompt.fields, "max_tokens": prompt.num_output}
        body |= {"temperature": self.options.temperature, "stream": True, "stream_options": {"include_usage": True}}
        ignore_eos = self.options.ignore_eos
        if self.options.dataset == "random" if ignore_eos is None else ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | self.options.extra_body).encode()

    async def warm_up(self) -> None:
        """One request alone, which names a mistake; then the others, which arrive as those that are measured."""
        for prompt in self.warm_ups[:1]:
            sent = await self.send(self.body(prompt), prompt)
            if sent.error:
                raise ValueError(f"the first request failed, so none was measured: {sent.error}")
        others = self.warm_ups[1:]
        self.progress = Counter("warm-ups", len(others))
        await self.arrive([self.body(prompt) for prompt in others], others)
        errors = [sent.error for sent in self.done if sent.error]
        if errors:
            raise ValueError(f"{len(errors)} warm-ups failed, so nothing was measured: {errors[0]}")
        self.done.clear()

    async def run(self) -> bool:
        """Send all requests; True if Ctrl-C ended it."""
        bodies = [self.body(prompt) for prompt in self.prompts]
        self.progress = Counter("requests", len(bodies))
        began, cpu_began = time.perf_counter(), time.process_time()
        stopped = False
        try:
            await self.arrive(bodies, self.prompts)
        except asyncio.CancelledError:  # how asyncio.run passes on SIGINT
            stopped = True
        self.duration, self.cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        self.done.sort(key=lambda sent: sent.started)
        self.progress.clear()
        return stopped

    async def arrive(self, bodies: list[bytes], prompts: list[Prompt]) -> None:
        rng = random.Random(self.options.seed)
        rate, burstiness = self.options.request_rate, self.options.burstiness
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for body, prompt in zip(bodies, prompts, strict=True):
                group.create_task(self.one(body, prompt))
                if not math.isinf(rate):
                    # Times are summed from the beginning, so that a late wake-up does not delay later arrivals.
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
        sent = Sent(num_input=prompt.num_input)
        try:
            async with asyncio.timeout(self.options.timeout):
                await self.client.stream(PATHS[self.options.endpoint], body, sent)
        except TimeoutError:
            sent.error = f"no whole answer within {self.options.timeout:g} s"
        return sent
