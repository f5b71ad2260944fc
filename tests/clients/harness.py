"""What the scripts of Python's clients share: the server to talk to, cases to run, and their results as JSON.

A script is run by the Python of its client's own environment, with one argument (see tests/server/test_clients.py). It
imports nothing of ours.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

SERVER: dict[str, Any] = json.loads(sys.argv[1])
URL: str = SERVER["url"]
ENDLESS: str = SERVER["endless"]
"""The address of a server whose answers last for minutes: no client leaves too late."""
MANY_TOKENS = 100_000  # as many as the context has room for
MODEL: str = SERVER["model"]
PROMPT: str = SERVER["prompt"]
EXPECTED: str = SERVER["expected"]
"""What the model answers to PROMPT at temperature 0 in NUM_TOKENS tokens."""
NUM_TOKENS: int = SERVER["num_tokens"]
NUM_PROMPT_TOKENS: int = SERVER["num_prompt_tokens"]
LONG = "river " * 3000  # more than the context
CITIES = ("Paris", "Oslo")
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": list(CITIES)}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ABORT_SECONDS = 20.0  # enough on a busy machine; the server itself drops a client that reads nothing after 60
CALL_TOKENS, SCHEMA_TOKENS = 100, 60  # room for a call and for an answer in the schema

Case = Callable[[], None]


def check_call(name: str, arguments: dict[str, Any]) -> None:
    assert name == TOOL["name"], name
    assert arguments["city"] in CITIES, arguments


def check_person(name: Any, age: Any) -> None:
    """Lengths and ranges are not checked: some clients leave them out of the schema that they send."""
    assert isinstance(name, str) and isinstance(age, int), (name, age)


def num_aborted() -> float:
    with urllib.request.urlopen(f"{ENDLESS}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if "request_success_total" in line and 'finished_reason="abort"' in line]
    return float(found[0].split()[-1]) if found else 0


def check_abort(begin_and_leave: Case) -> None:
    """The endless server ends a request whose client has left. Where a client can only drop its stream, Python closes
    the connection when it collects the stream, which threads of litellm may still hold a moment after the first time.
    """
    before = num_aborted()
    begin_and_leave()
    end = time.monotonic() + ABORT_SECONDS
    while num_aborted() == before:
        assert time.monotonic() < end, "the server has not aborted the request"
        time.sleep(0.05)
        gc.collect()


def refused(call: Case, *errors: type[BaseException]) -> BaseException:
    """The error of a call, which must be one of these."""
    try:
        call()
    except errors as error:
        return error
    raise AssertionError(f"not refused with {errors}")


def run(package: str, rows: dict[str, dict[str, Case]]) -> None:
    """Print, for each row of the table, the package's version and how each case ended: null or a traceback."""
    results: dict[str, Any] = {}
    for row, cases in rows.items():
        ended: dict[str, Any] = {}
        for name, case in cases.items():
            try:
                case()
                ended[name] = None
            except Exception as error:
                ended[name] = "".join(traceback.format_exception(error, chain=False))
        results[row] = {"package": package, "version": version(package), "cases": ended}
    print("\n" + json.dumps(results))


def named(*cases: Case) -> dict[str, Case]:
    return {case.__name__: case for case in cases}
