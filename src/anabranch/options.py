"""Command-line options that are made from fields of EngineConfig, and the number types of options: they refuse what is
out of range.

Where 0 means "auto" in a configuration, the types refuse a 0 on the command line: to get auto, leave the option out.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from anabranch.config import AT_LEAST, AUTO, CHOICES, DTYPES, EngineConfig

Number = TypeVar("Number", int, float)

FLAGS = (
    "graphs",
    "deterministic",
    "moe_combine",
    "shared_expert",
    "tune",
    "quantization",
    "kv_cache_dtype",
    "state_dtype",
)
"""Fields of EngineConfig that are options of every command that runs an engine."""
SPECULATION = ("speculative", "speculative_tokens")
"""Those of the commands that generate answers."""
RANKS = ("tensor_parallel_size", "expert_parallel", "data_parallel_size", "nodes")
"""Those of models that are divided."""
PLACEMENT = ("expert_copies", "rebalance_interval")
"""Those of experts that move."""
HELP = {
    "dtype": "what to compute in (default: the model's own)",
    "load_format": "dummy: random weights, only the config is read",
    "max_model_len": "tokens of prompt and answer (default: the model's)",
    "expert_load_interval": "steps between two copies of the expert histogram to the host; 0: no histogram",
    "generation_config": "whether generation_config.json gives temperature and the like where requests do not "
    "(default auto: yes)",
    "page_size": "tokens in a KV page",
    "num_pages": "KV pages (auto: as many as fit into the memory)",
    "prefix_cache": "compute a prefix that prompts share only once",
    "state_interval": "tokens of a long prompt between two copies of its states for the prefix cache",
    "async_scheduling": "launch a step before the tokens of the last one are read",
    "graphs": "how steps are captured as graphs; see docs/tuning.md",
    "moe_combine": "how experts' rows are summed; ordered: the same bits every time",
    "shared_expert": "where a shared expert runs",
    "deterministic": "the same bits for a request, whatever is computed with it",
    "tune": "measure the experts' tiles at start if no table fits",
    "quantization": "quantise the weights of a plain checkpoint while loading it",
    "speculative": "verify several next tokens in one step, guessed. ngram: from repetitions in prompt and answer; "
    "mtp: by the checkpoint's draft layer",
    "speculative_tokens": "the most guesses of one request in a step",
    "tensor_parallel_size": "ranks among which the model is divided, each with a device",
    "expert_parallel": "ranks have whole experts, not a part of each",
    "state_dtype": "what recurrent states are kept in; model: what is computed in",
    "nodes": "machines that have the ranks; run the same command on each: see docs/many_devices.md",
    "expert_copies": "room on each rank for copies of busy experts",
    "rebalance_interval": "steps after which experts are divided anew among ranks, by their load; 0: never",
    "data_parallel_size": "ranks with requests of their own, among which experts alone are divided",
    "kv_cache_dtype": "what keys and values are kept in; auto, model: what is computed in",
}
"""Help of options, by field of EngineConfig."""
FIELD_CHOICES = CHOICES | {"dtype": ("auto", *DTYPES), "load_format": ("safetensors", "dummy")}


def add_engine_options(parser: Any, *names: str) -> None:
    """Add options for these fields of EngineConfig to a parser, or to a group of its options."""
    add_fields(parser, EngineConfig, {name: HELP[name] for name in names})


def add_memory_fraction(parser: Any, help: str, default: float = 0.0) -> None:
    name, share = "--gpu-memory-utilization", above_zero(1)
    parser.add_argument(name, type=share, default=default, metavar="F", dest="memory_fraction", help=help)


def engine_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that `add_engine_options` has added, with their values."""
    return {name: getattr(options, name) for name in HELP if hasattr(options, name)}


def add_fields(parser: Any, config: type, help: Mapping[str, str]) -> None:
    """Add an option for each of these fields of a dataclass. Its default decides what the option takes."""
    for name, text in help.items():
        default = config.__dataclass_fields__[name].default  # type: ignore[attr-defined]
        how: dict[str, Any] = {"default": default}
        shown = default or "auto"
        if isinstance(default, bool):
            how["action"], shown = argparse.BooleanOptionalAction, "yes" if default else "no"
        elif isinstance(default, str):
            how["choices"], shown = FIELD_CHOICES[name], "%(default)s"  # a command may have another default
        elif isinstance(default, float):
            how |= {"type": float, "metavar": "S"}
        else:
            least = AT_LEAST.get(name, 1 if default in (None, AUTO) else 0)
            how |= {"type": int if least == 0 and config is not EngineConfig else at_least(least), "metavar": "N"}
        if "(default" not in text:
            text += f" (default {shown})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **how)


def at_least(low: int) -> Callable[[str], int]:
    return _ranged(int, lambda value: value >= low, f"a whole number of at least {low}")


def above_zero(high: float = math.inf) -> Callable[[str], float]:
    words = "a number above 0" if math.isinf(high) else f"a number in (0, {high:g}]"
    return _ranged(float, lambda value: 0 < value <= high, words)


def between(low: float, high: float) -> Callable[[str], float]:
    return _ranged(float, lambda value: low <= value <= high, f"a number in [{low:g}, {high:g}]")


def _ranged(number_type: type[Number], fits: Callable[[Number], bool], words: str) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        try:
            value = number_type(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"must be {words}, not {text!r}")
        return value

    return read
