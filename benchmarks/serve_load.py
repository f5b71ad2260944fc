"""The same load on any OpenAI-compatible server, to compare two: `python benchmarks/serve_load.py URL MODEL OUT`.

Streams of 1,024 words in and 128 tokens out, greedy, distinct prompts: Poisson arrivals at 4, 16 and 32 requests a
second, then 64 at a time. A word `wN` is one token where the tokenizer is word-level, which `write_tokenizer` makes for
both servers: `python benchmarks/serve_load.py --tokenizer FOLDER CONFIG_JSON`. Needs aiohttp, which is independent of
both engines. Per load: time to first token, per output token and to the last token (50 % and 99 %), output tokens a
second, the longest gap in a stream.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

LOADS = ((4, 60, 999), (16, 240, 999), (32, 400, 999), (None, 512, 64))
"""Requests a second (None: as soon as one ends), how many, how many at a time."""


def write_tokenizer(folder: Path, config: Path, text: Sequence[str] = ()) -> None:
    """`text`: words that take the last ids, for a load that is made of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    size = json.loads(config.read_text())["vocab_size"]
    words = [*(f"w{number}" for number in range(size - len(text))), *text]
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(config, folder / "config.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 16384}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


async def stream(session: aiohttp.ClientSession, url: str, model: str, prompt: str, num_out: int) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": num_out, "min_tokens": num_out, "ignore_eos": True}
    body |= {"temperature": 0.0, "stream": True, "stream_options": {"include_usage": True}}
    began, times, count = time.perf_counter(), [], 0
    async with session.post(url + "/v1/completions", json=body) as answer:
        if answer.status != 200:
            return {"error": (await answer.text())[:200]}
        async for line in answer.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[6:])
            count = (event.get("usage") or {}).get("completion_tokens", count)
            if event.get("choices") and event["choices"][0].get("text"):
                times.append(time.perf_counter())
    if not times:
        return {"error": "no text"}
    gap = max((b - a for a, b in pairwise(times)), default=0.0)
    return {"ttft": times[0] - began, "e2e": times[-1] - began, "num": count, "gap": gap}


async def load(
    url: str, model: str, rate: float | None, num: int, at_a_time: int, num_in: int = 1024, num_out: int = 128
) -> dict[str, Any]:
    import aiohttp

    rng, room = random.Random(num), asyncio.Semaphore(at_a_time)
    connector, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=patience, connector=connector, read_bufsize=2**20) as session:

        async def one() -> dict[str, Any]:
            async with room:
                prompt = " ".join(f"w{rng.randrange(1000, 100000)}" for _ in range(num_in))
                return await stream(session, url, model, prompt, num_out)

        began, tasks = time.perf_counter(), []
        for _ in range(num):
            tasks.append(asyncio.create_task(one()))
            if rate:
                await asyncio.sleep(rng.expovariate(rate))
        results = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    good = [result for result in results if "ttft" in result]
    assert good, results[0]

    def ms(values: list[float]) -> list[float]:
        values.sort()
        return [round(1e3 * values[min(len(values) - 1, int(part * len(values)))], 2) for part in (0.5, 0.99)]

    return {
        "rate": rate,
        "num": num,
        "at_a_time": at_a_time,
        "errors": num - len(good),
        "output_tokens_s": round(sum(result["num"] for result in good) / seconds, 1),
        "ttft_ms": ms([result["ttft"] for result in good]),
        "tpot_ms": ms([(result["e2e"] - result["ttft"]) / max(1, result["num"] - 1) for result in good]),
        "e2e_ms": ms([result["e2e"] for result in good]),
        "longest_gap_ms": ms([result["gap"] for result in good]),
    }


async def main() -> None:
    url, model, out = sys.argv[1:4]
    await load(url, model, 8, 24, 999)
    await load(url, model, None, 64, 64, 256, 32)
    rows = []
    for rate, num, at_a_time in LOADS:
        rows.append(await load(url, model, rate, num, at_a_time))
        print(json.dumps(rows[-1]), flush=True)
        Path(out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    if sys.argv[1] == "--tokenizer":
        write_tokenizer(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        asyncio.run(main())
