"""Many clients at once, some of whom leave: the others get what the offline engine says, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from anabranch import bundled
from anabranch.llm import LLM, SamplingParams
from tests.server.serving import QUICK, Running, Unharmed, running

NUM_REQUESTS = 500
AT_ONCE = 64
MAX_COST = 600e-6  # seconds; the aim is 150e-6 on a machine with nothing else to do
SURE = 1e-3  # nats between the best token and the next: what rounding in another batch cannot turn round


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with running(model, "--max-num-seqs", str(AT_ONCE), "--num-pages", "4000") as server:
        yield server


def body_of(said: bytes) -> bytes:
    """Of a whole HTTP/1.1 answer."""
    head, _, rest = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), said[:500]
    if b"transfer-encoding: chunked" not in head.lower():
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def text_of(body: bytes, stream: bool) -> str:
    if not stream:
        return str(json.loads(body)["choices"][0]["text"])
    events = [event for event in body.decode().split("\n\n") if not event.startswith(":")]  # without pings
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def ask(
    server: Running,
    body: dict[str, Any],
    num_pieces: int | None = None,
    seconds: float = 0.0,
    path: str = "/v1/completions",
) -> bytes:
    """The answer as it was on the wire: a client of few instructions, because it shares the machine with the server.
    With `num_pieces` it hangs up after so many of them and some time."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        pieces: list[bytes] = []
        while num_pieces is None or len(pieces) < num_pieces:
            if not (piece := await reader.read(65536)):
                break
            pieces.append(piece)
        await asyncio.sleep(seconds)
        return b"".join(pieces)
    finally:
        writer.close()


def num_aborted(server: Running) -> int:
    lines = server.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if 'finished_reason="abort"' in line))


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str]]:
    """Prompt → how many tokens to ask for, and what the offline engine says."""
    prompts = [f"{'The river ' * (i % 7)}{i} goes" for i in range(150)]
    params = [SamplingParams(temperature=0, max_tokens=8 + i % 25, ignore_eos=True, logprobs=2) for i in range(150)]
    found = {}
    with LLM(bundled.folder(), max_num_seqs=AT_ONCE, num_pages=4000) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params)):
            (said,) = output.completions
            assert said.logprobs is not None
            if all(one.top[0][1] - one.top[1][1] > SURE for one in said.logprobs):
                found[prompt] = len(said.token_ids), said.text
    assert len(found) > 100
    return found


@pytest.mark.slow
def test_all_who_stay_are_answered(answers: dict[str, tuple[int, str]]) -> None:
    """Of the bundled model."""
    with running(None, "--max-num-seqs", str(AT_ONCE), "--num-pages", "4000") as server:
        serve_a_crowd(server, answers)


def serve_a_crowd(server: Running, answers: dict[str, tuple[int, str]]) -> None:
    unharmed = Unharmed(server)
    before = num_aborted(server)
    prompts = list(answers)
    leaving = set(Random(0).sample(range(NUM_REQUESTS), NUM_REQUESTS // 10))
    places = asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> None:
        prompt, stream = prompts[number % len(prompts)], number % 2 == 0
        num_tokens, expected = answers[prompt]
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        async with places:
            if number in leaving:
                pieces = 1 + number % 3 if stream else 0
                await ask(server, body | {"max_tokens": 900}, pieces, 0.01 * (number % 5))
            else:
                said = await ask(server, body)
                assert text_of(body_of(said), stream) == expected, (number, prompt)

    async def everybody() -> None:
        async with asyncio.timeout(4 * QUICK), asyncio.TaskGroup() as group:
            for number in range(NUM_REQUESTS):
                group.create_task(one(number))

    asyncio.run(everybody())
    server.until_idle()
    # A stream that was left had begun; others may have been given up before the engine knew of them.
    assert sum(number % 2 == 0 for number in leaving) <= num_aborted(server) - before <= len(leaving)
    unharmed.check()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        pytest.param("/v1/completions", marks=pytest.mark.slow),
        pytest.param("/v1/messages", marks=pytest.mark.slow),
    ],
)
def test_what_a_streamed_token_costs(
    server: Running, path: str, capsys: pytest.CaptureFixture[str], thorough: bool
) -> None:
    """In CPU time of the process that speaks HTTP; the engine's is not in it."""
    num_tokens = 150 if thorough else 60
    process = psutil.Process(server.process.pid)
    body: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0, "stream": True}
    if path != "/v1/messages":
        body["ignore_eos"] = True

    def prompt(number: int) -> dict[str, Any]:
        text = f"Stream {number}"
        return {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}

    async def streams() -> list[bytes]:
        async with asyncio.timeout(4 * QUICK):
            return await asyncio.gather(*(ask(server, body | prompt(i), path=path) for i in range(AT_ONCE)))

    made, began = server.stats()["generation_tokens"], process.cpu_times()
    said = asyncio.run(streams())
    ended, num_made = process.cpu_times(), server.stats()["generation_tokens"] - made
    seconds = ended.user + ended.system - began.user - began.system
    num_chunks = sum(answer.count(b"data: {") for answer in said)
    assert num_made > 0.8 * AT_ONCE * num_tokens and num_chunks > num_made / 4, "there was nothing to measure"
    with capsys.disabled():
        print(
            f"\n{path}: {1e6 * seconds / num_made:.0f} µs of CPU a token, {1e6 * seconds / num_chunks:.0f} µs an event "
            f"({AT_ONCE} streams, {num_made} tokens in {num_chunks} events)"
        )
    assert seconds / num_made < MAX_COST
