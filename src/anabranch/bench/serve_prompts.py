"""What `bench serve` asks: random prompts of given lengths, or those of a file. Knows no HTTP but two optional routes.

Lengths of random prompts are exact where the server tokenises for us (/tokenize, as Anabranch and vLLM have it) and
takes token ids; elsewhere text is made to measure as well as can be, and the server's own count is what is reported.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.bench.serve_client import Client, Refused

TEXT = """
river water stone bridge valley mountain winter summer morning evening small large quiet early open narrow cold warm
walk carry follow divide gather return begin leave build answer question letter number table window garden forest
field road village city music silence paper colour light shadow friend child teacher sailor market harbour island
between under across behind before after toward around because although whenever slowly often never always almost
"""
WORDS = TEXT.split()
TOKENS_PER_WORD = 1.3  # where nobody tells: about what large vocabularies need for English


@dataclass(frozen=True, slots=True)
class Prompt:
    fields: dict[str, Any]
    """`prompt` or `messages`, as the body has it."""
    num_output: int
    num_input: int = 0
    """As meant; the server's count wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    input: int
    output: int
    prefix: int = 0
    """Tokens at the beginning that all prompts share."""
    range_ratio: float = 0.0
    """Lengths are uniform in [n · (1 − ratio), n · (1 + ratio)]."""

    def __post_init__(self) -> None:
        if min(self.input, self.output) < 1 or self.prefix < 0:
            raise ValueError("--random-input-len and --random-output-len must be at least 1, the prefix at least 0")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--random-range-ratio must lie in [0, 1), not {self.range_ratio:g}")

    def draw(self, length: int, rng: random.Random) -> int:
        low, high = int(length * (1 - self.range_ratio)), int(length * (1 + self.range_ratio))
        return max(1, rng.randint(low, high))


async def random_prompts(
    client: Client, model: str, endpoint: str, num: int, lengths: Lengths, seed: int
) -> list[Prompt]:
    rng = random.Random(seed)
    known = await _token_ids(client, model)
    ids = sorted(set(known)) if endpoint == "completions" else []
    per_word = len(known) / len(WORDS) if known else TOKENS_PER_WORD

    def tokens(count: int) -> list[Any]:
        return rng.choices(ids, k=count) if ids else rng.choices(WORDS, k=max(1, round(count / per_word)))

    prefix = tokens(lengths.prefix) if lengths.prefix else []
    prompts = []
    for _ in range(num):
        num_input = lengths.draw(lengths.input, rng)
        parts = prefix + tokens(num_input)
        made = parts if ids else " ".join(parts)
        prompts.append(Prompt(_fields(endpoint, made), lengths.draw(lengths.output, rng), num_input + lengths.prefix))
    return prompts


async def _token_ids(client: Client, model: str) -> list[int]:
    """Of our words, in the server's vocabulary; empty where it does not tell."""
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
    if "messages" in given:
        if endpoint != "chat":
            raise ValueError(f"{where}: `messages` are for --endpoint chat")
        return Prompt({"messages": given["messages"]}, wanted)
    return Prompt(_fields(endpoint, given["prompt"]), wanted)


def _fields(endpoint: str, prompt: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt}
