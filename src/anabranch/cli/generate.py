"""Write a continuation of a prompt to standard output as it is generated."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from anabranch import bundled
from anabranch.llm import LLM, Prompt, SamplingParams
from anabranch.models.generation import NAMES
from anabranch.options import FLAGS, RANKS, SPECULATION, add_engine_options, engine_fields
from anabranch.stages import Stages


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help=bundled.HELP)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads standard input")
    add_model_options(parser)
    add_sampling_options(parser, max_tokens=128, temperature=0.0)
    parser.add_argument("--ignore-eos", action="store_true", help="continue after the end-of-text token")
    parser.add_argument("--quiet", action="store_true", help="print the text alone, no figures")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser, "dtype", "max_model_len", "load_format", *FLAGS, *RANKS, *SPECULATION)
    parser.add_argument("--verbose", action="store_true", help="show what the start spent its time on")


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int, temperature: float) -> None:
    """`temperature` applies where neither the command line nor the model's generation_config.json names one."""
    parser.set_defaults(default_temperature=temperature)
    add = parser.add_argument
    add("--max-tokens", type=int, default=max_tokens, metavar="N", help="tokens of an answer (default %(default)s)")
    add("--temperature", type=float, metavar="T", help=f"0: greedy (default: the model's, or {temperature})")
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens (default: the model's, or all)")
    top_p = "draw from the most likely tokens that together have probability P"
    add("--top-p", type=float, metavar="P", help=f"{top_p} (default: the model's, or 1)")
    min_p = "leave out tokens less likely than P times the most likely one"
    add("--min-p", type=float, metavar="P", help=f"{min_p} (default: the model's, or 0)")
    repetition = "above 1: make tokens that have occurred less likely (default: the model's, or 1)"
    add("--repetition-penalty", type=float, metavar="X", help=repetition)
    add_engine_options(parser, "generation_config")
    add("--seed", type=int, metavar="N", help="a seed draws the same tokens from the same logits")
    add("--stop", action="append", default=[], metavar="TEXT", help="end the answer before TEXT; may be repeated")


def sampling_params(options: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """`defaults` are those of the model."""
    given = {name: getattr(options, name) for name in NAMES if getattr(options, name) is not None}
    return SamplingParams(
        **{"temperature": options.default_temperature, **defaults, **given},
        seed=options.seed,
        max_tokens=options.max_tokens,
        stop=tuple(options.stop),
        ignore_eos=getattr(options, "ignore_eos", False),
    )


def open_model(options: argparse.Namespace) -> LLM:
    return LLM(
        options.model,
        max_num_seqs=1,
        max_num_batched_tokens=2048,
        show_progress=True if options.verbose else None,
        stages=Stages.of_process(),
        **engine_fields(options),
    )


def run(options: argparse.Namespace) -> int:
    sampling_params(options, {})  # raises for values out of range before anything is loaded
    if options.model is None and os.path.isfile(os.path.join(options.prompt, "config.json")):
        raise ValueError(f"{options.prompt} is a model; give the text to continue after it")
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt:
        raise ValueError("the prompt is empty: give some text to continue")
    started = time.perf_counter()
    with open_model(options) as llm:
        loaded = time.perf_counter()
        params = sampling_params(options, llm.sampling_defaults)
        count = asyncio.run(write_answer(llm, prompt, params, [], before=prompt))
        drafted, accepted = llm.engine.metrics.draft_tokens, llm.engine.metrics.accepted_tokens
    print(flush=True)  # before the line on stderr, where both go into one pipe
    if not options.quiet:
        seconds = time.perf_counter() - loaded
        drafts = f"; {accepted} of {drafted} drafts were right" if drafted else ""
        print(
            f"[{count} tokens in {seconds:.2f} s, {count / max(seconds, 1e-9):.1f} tokens/s{drafts}; "
            f"ready after {loaded - started:.2f} s]",
            file=sys.stderr,
        )
    return 0


async def write_answer(llm: LLM, prompt: Prompt, params: SamplingParams, texts: list[str], before: str = "") -> int:
    """Print `before` and the answer to a prompt as it is generated, and add its parts to `texts`; return the number of
    tokens."""
    count = 0
    async for delta in llm.stream(prompt, params):
        print(delta.text if texts else before + delta.text, end="", flush=True)
        texts.append(delta.text)
        count += len(delta.token_ids)
    return count
