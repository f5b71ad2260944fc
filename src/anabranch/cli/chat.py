"""Chat with a model in the terminal. An empty line or Ctrl-D ends the conversation, Ctrl-C ends an answer early.

The model needs a chat template.
"""

import argparse
import asyncio
import contextlib
import sys
from typing import Any

from anabranch import bundled
from anabranch.cli.generate import add_model_options, add_sampling_options, open_model, sampling_params, write_answer


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=bundled.HELP)
    parser.add_argument("--system", metavar="TEXT", help="instructions to the model before the conversation")
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=512, temperature=0.7)


def run(options: argparse.Namespace) -> int:
    sampling_params(options, {})  # raises for values out of range before anything is loaded
    messages: list[dict[str, Any]] = [{"role": "system", "content": options.system}] if options.system else []
    with open_model(options) as llm:
        llm.render(messages or [{"role": "user", "content": "?"}])  # raises for a model without a template
        params = sampling_params(options, llm.sampling_defaults)
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  gives input() editing and history
        while True:
            try:
                question = input("you: " if interactive else "")
            except EOFError:
                print(end="\n" if interactive else "")
                break
            if not question.strip():
                break
            messages.append({"role": "user", "content": question})
            answer: list[str] = []
            with contextlib.suppress(KeyboardInterrupt):  # the part that was written stays in the conversation
                asyncio.run(write_answer(llm, llm.render(messages), params, answer))
            print(flush=True)
            messages.append({"role": "assistant", "content": "".join(answer)})
    return 0
