"""Talk to a model in the terminal. An empty line or Ctrl-D ends the conversation, Ctrl-C cuts an answer short.

MODEL is a folder as Hugging Face lays it out, or a hub id (owner/name), with a chat template; without one, the small
model that comes with Anabranch answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from anabranch import bundled
from anabranch.cli.generate import add_model_options, add_sampling_options, open_model, sampling_params

if TYPE_CHECKING:
    from anabranch.llm import LLM
    from anabranch.sampling_params import SamplingParams


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=bundled.HELP)
    parser.add_argument("--system", metavar="TEXT", help="instructions that stand before the conversation")
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=512, temperature=0.7)


def run(options: argparse.Namespace) -> int:
    sampling_params(options, {})  # refuses what is out of range before anything is loaded
    messages: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    with open_model(options) as llm:
        llm.render(messages or [{"role": "user", "content": "?"}])  # a model without a template says so at once
        params = sampling_params(options, llm.sampling_defaults)
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  input() then edits and remembers lines
        while True:
            try:
                said = input("you: " if interactive else "")
            except EOFError:
                print(end="\n" if interactive else "")
                break
            if not said.strip():
                break
            messages.append({"role": "user", "content": said})
            answer: list[str] = []
            with contextlib.suppress(KeyboardInterrupt):  # what was said so far stays in the conversation
                asyncio.run(speak(llm, messages, params, answer))
            print(flush=True)
            messages.append({"role": "assistant", "content": "".join(answer)})
    return 0


async def speak(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, answer: list[str]) -> None:
    async for delta in llm.stream(llm.render(messages), params):
        answer.append(delta.text)
        print(delta.text, end="", flush=True)
