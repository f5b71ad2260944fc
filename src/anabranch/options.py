"""Command-line options that several commands share, and the number types of options: they refuse what is out of range.

Where 0 means "auto" in a configuration, the types refuse a 0 on the command line: to get auto, leave the option out.
"""

import argparse
import math
from collections.abc import Callable
from typing import Any, TypeVar

from anabranch.config import GENERATION_CONFIG_HELP, GENERATION_CONFIGS

Number = TypeVar("Number", int, float)


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


SHARED: dict[str, dict[str, Any]] = {
    "dtype": {
        "default": "auto",
        "choices": ["auto", "float32", "float16", "bfloat16"],
        "help": "what to compute in (default: the model's own)",
    },
    "load_format": {
        "default": "safetensors",
        "choices": ["safetensors", "dummy"],
        "help": "dummy: random weights, only the config is read (default safetensors)",
    },
    "max_model_len": {
        "type": at_least(1),
        "default": 0,
        "metavar": "N",
        "help": "tokens of context, prompt and answer together (default: the model's limit)",
    },
    "expert_load_interval": {
        "type": at_least(0),
        "default": 16,
        "metavar": "N",
        "help": "steps between two copies of the expert histogram to the host; 0: no histogram (default 16)",
    },
    "generation_config": {
        "default": "auto",
        "choices": GENERATION_CONFIGS,
        "help": f"{GENERATION_CONFIG_HELP} (default auto)",
    },
}


def add_shared(parser: Any, *names: str) -> None:
    """Add options of SHARED to a parser or to a group of its options."""
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", **SHARED[name])
