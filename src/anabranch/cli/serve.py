"""Serve a model over HTTP: a page to chat with on http://127.0.0.1:8000, OpenAI's and Anthropic's API under /v1.

MODEL is a folder as Hugging Face lays it out, or a hub id (owner/name); without one, the small model that comes with
Anabranch is served.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from anabranch import bundled
from anabranch.config import (
    AUTO,
    CHOICES,
    FLAG_HELP,
    GENERATION_CONFIG_HELP,
    GENERATION_CONFIGS,
    EngineConfig,
)
from anabranch.ranges import above_zero, at_least

RARE_HELP = FLAG_HELP | {
    "load_format": "dummy: random weights, only the config is read",
    "page_size": "tokens in a KV page",
    "num_pages": "KV pages, instead of as many as the memory holds",
    "prefix_cache": "compute what prompts begin alike with only once",
    "async_scheduling": "launch a step before the last one's tokens are read",
    "expert_load_interval": "steps between two copies of the experts' histogram to the host; 0: nothing is counted",
    "max_connections": "connections open at once; the next gets 503",
    "max_body_bytes": "a larger body gets 413; auto: 2 MiB + 32 bytes per token of context, at most 16 MiB",
    "max_header_bytes": "larger headers get 431",
    "header_timeout": "seconds for headers to arrive",
    "body_timeout": "seconds for a body to arrive",
    "prepare_timeout": "seconds to render and tokenise a prompt",
    "stall_timeout": "seconds until a client that takes nothing is cut off",
    "keep_alive_timeout": "seconds an idle connection is kept",
    "step_timeout": "seconds after which a step counts as hanging",
    "start_timeout": "seconds for the engine to be ready",
}
"""Of fields whose options only --help=all shows."""
WORDS = CHOICES | {"load_format": ("safetensors", "dummy")}


def add_options(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group(conflict_handler="resolve")  # argparse's own --help takes no word
    own.add_argument("-h", "--help", action=Help, nargs="?", const="core", metavar="all", help="all: every option")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=bundled.HELP)
    _add_core(parser)
    rare = Rare(parser.add_argument_group("more"))
    _add_rare(rare)
    parser.set_defaults(_rare=rare.actions)


def _add_core(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("who may ask")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    http.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000; 0: any free one")
    http.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="may be repeated; ANABRANCH_API_KEY"
    )
    http.add_argument("--allow-no-api-key", action="store_true", help="serve other machines without a key")
    http.add_argument("--served-model-name", nargs="+", default=[], metavar="NAME", help="what clients call the model")
    model = parser.add_argument_group("the model")
    model.add_argument("--dtype", default="auto", choices=["auto", "float32", "float16", "bfloat16"])
    model.add_argument(
        "--max-model-len", type=at_least(1), default=0, metavar="N", help="tokens of context (default: all)"
    )
    model.add_argument("--gpu-memory-utilization", type=above_zero(1), default=0.0, metavar="F", dest="memory_fraction",
                       help="share of the device's memory to use (default: the platform's)")  # fmt: skip
    model.add_argument(
        "--max-num-seqs", type=int, default=512, metavar="N", help="requests that run at once (default 512)"
    )
    model.add_argument(
        "--max-num-batched-tokens",
        type=at_least(1),
        default=AUTO,
        metavar="N",
        help="tokens in one step (default 8192)",
    )
    model.add_argument("--enforce-eager", action="store_const", const="none", default="auto", dest="graphs",
                       help="launch every kernel by itself, without captured graphs: --graphs none")  # fmt: skip
    model.add_argument(
        "--generation-config",
        default="auto",
        choices=GENERATION_CONFIGS,
        help=f"{GENERATION_CONFIG_HELP} (default auto)",
    )
    model.add_argument("--seed", type=int, default=0, metavar="N", help="of requests that name none (default 0)")
    chat = parser.add_argument_group("chats")
    chat.add_argument("--chat-template", metavar="FILE", help="instead of the model's own")
    chat.add_argument("--tool-call-parser", default="auto", metavar="NAME", help="default: by the chat template")
    chat.add_argument("--reasoning-parser", default="auto", metavar="NAME", help="default: by the chat template")
    life = parser.add_argument_group("running it")
    life.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="S",
                      help="after SIGTERM, seconds for requests to finish (default 30)")  # fmt: skip
    life.add_argument(
        "--max-queue", type=int, default=1024, metavar="N", help="requests that may wait; then 429 (default 1024)"
    )
    life.add_argument("--metrics-compat", default="", choices=["vllm"], help="vLLM's metric names too")
    life.add_argument("--log-format", default="text", choices=["text", "json"], help="default text")


def names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


class Rare:
    """Options that --help names only with =all."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.actions: list[tuple[argparse.Action, str]] = []

    def add(self, flag: str, about: str, **options: Any) -> None:
        self.actions.append((self.group.add_argument(flag, help=argparse.SUPPRESS, **options), about))


def _add_rare(rare: Rare) -> None:
    from anabranch.server.settings import Settings

    named = {field.name for field in fields(Settings)} | {"model", "dtype", "max_model_len", "memory_fraction", "seed"}
    named |= {"max_num_seqs", "max_num_batched_tokens", "serving", "generation_config"}
    hosts = "host names to answer to without a key, beside localhost and addresses; *: any (default none)"
    rare.add("--allowed-hosts", hosts, type=names, default=(), metavar="NAME,...")
    own = [field for field in fields(Settings) if field.name in RARE_HELP]
    for field in own + [field for field in fields(EngineConfig) if field.name not in named]:
        default: Any = field.default
        flag = "--" + field.name.replace("_", "-")
        shown = ("yes" if default else "no") if isinstance(default, bool) else default or "auto"
        text = f"{RARE_HELP[field.name]} (default {shown})"
        if isinstance(default, bool):
            rare.add(flag, text, action=argparse.BooleanOptionalAction, default=default)
        elif isinstance(default, str):
            rare.add(flag, text, choices=WORDS[field.name], default=default)
        else:
            kind = int if default is None else type(default)
            read = at_least(1) if kind is int and default in (None, AUTO) else kind
            rare.add(flag, text, type=read, default=default, metavar="N" if kind is int else "S")


class Help(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values not in ("core", "all"):
            parser.error(f"--help={values}: it is --help or --help=all")
        if values == "all":
            for action, about in parser.get_default("_rare"):
                action.help = about
        parser.print_help()
        parser.exit()


def run(options: argparse.Namespace) -> int:
    if options.model is None:
        for name in options.served_model_name:
            if os.path.isdir(name):
                raise ValueError(f"--served-model-name has taken {name}, a folder, for a name: put MODEL before it")
        options.model = bundled.folder()
        options.served_model_name = options.served_model_name or [bundled.NAME]
    try:
        from anabranch import logs
        from anabranch.loader import locate
        from anabranch.server.lifecycle import serve
        from anabranch.server.settings import Settings
    except ImportError as error:
        raise ValueError(f"serving needs the package {error.name}; run: pip install {error.name}") from None
    given = vars(options)
    keys: Sequence[str] = options.api_key or [key for key in [os.environ.get("ANABRANCH_API_KEY")] if key is not None]
    settings = Settings(
        **{field.name: given[field.name] for field in fields(Settings) if field.name in given}
        | {"api_key": tuple(keys), "served_model_name": tuple(options.served_model_name)}
    )
    engine = EngineConfig(**{field.name: given[field.name] for field in fields(EngineConfig) if field.name in given})
    locate.local(engine.model)  # a wrong name is said before an address is
    logs.set_up(options.log_format)
    return serve(settings, engine)
