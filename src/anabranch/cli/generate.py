"""Write a greedy continuation of a prompt, token by token, to standard output.

MODEL is a folder as Hugging Face lays it out, or a hub id (owner/name).
"""

from __future__ import annotations

import argparse
import sys
import time

from anabranch.cli.progress import Bar


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads standard input")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="stop after N tokens (default 128)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    parser.add_argument(
        "--load-format",
        default="safetensors",
        choices=["safetensors", "dummy"],
        help="dummy: random weights, only the config is read",
    )
    parser.add_argument("--quiet", action="store_true", help="the text alone, no figures")


def run(options: argparse.Namespace) -> int:
    if options.max_tokens < 1:
        raise ValueError(f"--max-tokens must be at least 1, not {options.max_tokens}")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    started = time.perf_counter()

    from anabranch.engine.single import SingleSequence
    from anabranch.engine.tokenizer import Tokenizer
    from anabranch.loader.load import load_model
    from anabranch.loader.locate import locate

    folder = locate(options.model, weights=options.load_format != "dummy")
    tokenizer = Tokenizer(folder)
    prompt_ids = tokenizer.encode(prompt)
    if not prompt_ids:
        raise ValueError("the prompt is empty: give some text to continue")
    model = load_model(folder, dtype=options.dtype, load_format=options.load_format, progress=Bar("loading weights"))
    room = model.config.max_position - len(prompt_ids)
    if room < 1:
        raise ValueError(
            f"the prompt has {len(prompt_ids)} tokens, and this model's maximum context length is "
            f"{model.config.max_position} tokens; shorten the prompt"
        )
    max_tokens = min(options.max_tokens, room)
    loaded = time.perf_counter()

    sequence = SingleSequence(model, len(prompt_ids) + max_tokens)
    stop_ids = () if options.ignore_eos else model.config.eos_ids
    print(prompt, end="", flush=True)
    text = tokenizer.stream()
    count = 0
    for token in sequence.stream(prompt_ids, max_tokens, stop_ids):
        count += 1
        print(text.add(token), end="", flush=True)
    print(text.rest())
    if not options.quiet:
        seconds = time.perf_counter() - loaded
        print(
            f"\n[{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.1f} tokens/s; "
            f"ready after {loaded - started:.2f} s]",
            file=sys.stderr,
        )
    return 0
