"""`llm` with a model of extra-openai-models.yaml. It has no way to say that a tool must be called."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llm
import openai

from tests.clients import harness
from tests.clients.harness import EXPECTED, MODEL, NUM_PROMPT_TOKENS, NUM_TOKENS, PROMPT, SCHEMA, URL

FOLDER = Path(tempfile.mkdtemp(prefix="llm-"))
os.environ["LLM_USER_PATH"] = str(FOLDER)
ENTRY = """\
- model_id: {id}
  model_name: {name}
  api_base: "{url}/v1"
  supports_schema: true
  supports_tools: true
  can_stream: true
"""
models = {"demo": (MODEL, URL), "wrong": ("no-such-model", URL), "endless": (MODEL, harness.ENDLESS)}
entries = [ENTRY.format(id=id, name=name, url=url) for id, (name, url) in models.items()]
(FOLDER / "extra-openai-models.yaml").write_text("".join(entries))
OPTIONS = {"temperature": 0, "max_tokens": NUM_TOKENS}


def chat() -> None:
    command = [sys.executable, "-m", "llm", "-m", "demo", PROMPT, "--no-stream", "--key", "none"]
    command += ["-o", "temperature", "0", "-o", "max_tokens", str(NUM_TOKENS)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert found.stdout.strip() == EXPECTED, found


def ask(prompt: str = PROMPT, model: str = "demo", **options: object) -> llm.Response:
    return llm.get_model(model).prompt(prompt, key="none", **OPTIONS | options)


def stream() -> None:
    pieces = list(ask())
    assert "".join(pieces) == EXPECTED and len(pieces) > 3, pieces


def tools() -> None:
    def get_weather(city: str) -> str:
        """The weather of a city"""
        return f"rain in {city}"

    assert ask(tools=[get_weather], max_tokens=8, stream=False).text()


def structured() -> None:
    harness.check_person(**json.loads(ask(schema=SCHEMA, max_tokens=harness.SCHEMA_TOKENS, stream=False).text()))


def errors() -> None:
    harness.refused(lambda: ask(model="wrong").text(), openai.NotFoundError)
    harness.refused(lambda: ask(harness.LONG).text(), openai.BadRequestError)


def abort() -> None:
    def leave() -> None:
        pieces = iter(ask(model="endless", max_tokens=harness.MANY_TOKENS))
        next(piece for piece in pieces if piece)  # it has no close

    harness.check_abort(leave)


def usage() -> None:
    answer = ask(stream=False)
    answer.text()
    found = answer.usage()
    assert (found.input, found.output) == (NUM_PROMPT_TOKENS, NUM_TOKENS), found


harness.run("llm", {"llm": harness.named(chat, stream, tools, structured, errors, abort, usage)})
