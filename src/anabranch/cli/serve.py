"""Serve a model over HTTP: a chat page at http://127.0.0.1:8000, APIs of OpenAI and Anthropic under /v1,
Ollama's under /api."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from anabranch import bundled
from anabranch.config import AUTO, EngineConfig
from anabranch.config_file import add_config
from anabranch.options import (
    FLAGS,
    PLACEMENT,
    RANKS,
    SPECULATION,
    add_engine_options,
    add_fields,
    add_memory_fraction,
    at_least,
)

RARE_SETTINGS = {
    "max_connections": "open connections; further ones get 503",
    "max_body_bytes": "larger bodies get 413; auto: 2 MiB + 32 bytes per token of context, at most 16 MiB",
    "max_header_bytes": "larger headers get 431",
    "header_timeout": "seconds for headers to arrive",
    "body_timeout": "seconds for a body to arrive",
    "prepare_timeout": "seconds to render and tokenise a prompt",
    "stall_timeout": "seconds until a client that reads nothing is disconnected",
    "keep_alive_timeout": "seconds an idle connection is kept",
    "step_timeout": "seconds after which a step counts as hanging",
    "start_timeout": "seconds for the engine to be ready",
}
"""Help of the server's options that only --help=all shows, by field of Settings."""
REPLICAS = {
    "replicas": "engines that have the whole model each, run by Ray (default 0: one engine, without Ray)",
    "max_replicas": "start more of them where load is high, up to this number (default: as many as --replicas)",
    "max_imbalance": "a replica with this many more requests than the least busy one gets no more",
}
"""Help of the number options of ReplicaConfig."""
RARE_GROUP = "more"


def add_options(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group(conflict_handler="resolve")  # argparse's own --help takes no word
    own.add_argument("-h", "--help", action=Help, nargs="?", const="core", metavar="all", help="all: every option")
    add_config(own)
    parser.add_argument("model", metavar="MODEL", nargs="?", help=bundled.HELP)
    _add_core(parser)
    _add_rare(parser.add_argument_group(RARE_GROUP))


def _add_core(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("clients").add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    add("--port", type=int, default=8000, metavar="N", help="default 8000; 0: any free port")
    keys = "a key that clients may use; may be repeated (default: ANABRANCH_API_KEY, or none)"
    add("--api-key", action="append", default=[], metavar="KEY", help=keys)
    add("--allow-no-api-key", action="store_true", help="serve other machines without a key")
    name = "its name for clients (default: folder or hub id)"
    add("--served-model-name", nargs="+", default=[], metavar="NAME", help=name)
    model = parser.add_argument_group("the model")
    add_engine_options(model, "dtype", "max_model_len")
    add = model.add_argument
    add_memory_fraction(model, "share of memory to use (default: the platform's)")
    add("--max-num-seqs", type=int, default=512, metavar="N", help="requests that run at once (default 512)")
    tokens = "tokens in one step (default 8192)"
    add("--max-num-batched-tokens", type=at_least(1), default=AUTO, metavar="N", help=tokens)
    eager = "no captured graphs: the same as --graphs none"
    add("--enforce-eager", action="store_const", const="none", default="auto", dest="graphs", help=eager)
    add_engine_options(model, "generation_config")
    add("--seed", type=int, default=0, metavar="N", help="of requests that name none (default 0)")
    add = parser.add_argument_group("chats").add_argument
    add("--chat-template", metavar="FILE", help="use this template instead of the model's own")
    add("--tool-call-parser", default="auto", metavar="NAME", help="default: the one that fits the chat template")
    add("--reasoning-parser", default="auto", metavar="NAME", help="default: the one that fits the chat template")
    add = parser.add_argument_group("operation").add_argument
    shutdown = "after SIGTERM, seconds to finish in (default 30)"
    add("--shutdown-timeout", type=float, default=30.0, metavar="S", help=shutdown)
    queue = "waiting requests; others get 429 (default 1024)"
    add("--max-queue", type=int, default=1024, metavar="N", help=queue)
    add("--metrics-compat", default="", choices=["vllm"], help="export metrics under vLLM's names too")
    add("--log-format", default="text", choices=["text", "json"], help="default text")


def names(text: str) -> tuple[str, ...]:
    """a,b; or as vLLM has it, a list in JSON."""
    try:
        return tuple(str(name).strip() for name in (json.loads(text) if text.startswith("[") else text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is no list: write a,b or ["a", "b"]') from None


def _add_rare(group: Any) -> None:
    from anabranch.embedding import POOLINGS
    from anabranch.replicas.config import ROUTINGS, ReplicaConfig
    from anabranch.server.settings import Settings

    hosts = "host names to answer to without a key, besides localhost and addresses; *: any (default none)"
    group.add_argument("--allowed-hosts", type=names, default=(), metavar="NAME,...", help=hosts)
    origins = "origins of web pages that may use the server (CORS), as in http://localhost:3000; *: any (default none)"
    group.add_argument("--allowed-origins", type=names, default=(), metavar="ORIGIN,...", help=origins)
    pooling = "the rows of an embedding: of a prompt's last token, or the mean of all, where a request says nothing"
    group.add_argument("--pooling", choices=POOLINGS, default="last", help=f"{pooling} (default last)")
    add_engine_options(group, *RANKS, *PLACEMENT)
    add_fields(group, ReplicaConfig, REPLICAS)
    routing = "the replica a request goes to: the one with its prompt's longest prefix in the cache, or the least busy"
    group.add_argument("--routing", choices=ROUTINGS, default="prefix", help=f"{routing} (default prefix)")
    address = "HOST:PORT of a running Ray cluster, or auto, for replicas (default: one on this machine) or nodes"
    group.add_argument("--ray-address", metavar="ADDR", help=address)
    add_engine_options(group, *SPECULATION, "load_format", "expert_load_interval")
    add_fields(group, Settings, RARE_SETTINGS)
    add_engine_options(group, "page_size", "num_pages", "prefix_cache", "state_interval", "async_scheduling", *FLAGS)


class Help(argparse.Action):
    """--help without the rare options, --help=all with them."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values not in ("core", "all"):
            parser.error(f"--help={values}: it is --help or --help=all")
        if values == "core":
            for group in parser._action_groups:
                for action in group._group_actions if group.title == RARE_GROUP else ():
                    action.help = argparse.SUPPRESS
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
        from anabranch.replicas.config import ReplicaConfig
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
    ray_address = options.ray_address if engine.nodes > 1 and not options.replicas + options.max_replicas else None
    if ray_address:
        given = given | {"ray_address": None}
    replicas = ReplicaConfig(**{field.name: given[field.name] for field in fields(ReplicaConfig)})
    locate.local(engine.model)  # reports a wrong name before the server listens
    logs.set_up(options.log_format)
    if ray_address:
        ReplicaConfig(replicas=1, ray_address=ray_address).set_environment()
        try:
            from anabranch.ranks.actors import on_cluster
        except ImportError as error:
            raise ValueError(f"--ray-address needs {error.name}; run: pip install 'anabranch[ray]'") from None
        with on_cluster(engine, ray_address):
            return serve(settings, engine)
    if engine.nodes > 1:
        from anabranch.ranks.runner import follow_here

        if (code := follow_here(engine)) is not None:
            return code
    if not replicas.replicas:
        return serve(settings, engine)
    replicas.set_environment()
    try:
        from anabranch.replicas.client import ReplicaClient
    except ImportError as error:
        raise ValueError(f"--replicas needs the package {error.name}; run: pip install 'anabranch[ray]'") from None
    return serve(settings, engine, start_client=partial(ReplicaClient.start, config=replicas, settings=settings))
