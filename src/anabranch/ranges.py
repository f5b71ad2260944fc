"""Numbers on the command line, refused outside their range with the range in the message: types for argparse.

Where 0 stands for "auto" in a configuration, a 0 that somebody typed is a mistake: auto is to leave the option out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def at_least(low: int) -> Callable[[str], int]:
    return _ranged(int, lambda value: value >= low, f"a whole number of at least {low}")


def above_zero(high: float = math.inf) -> Callable[[str], float]:
    words = "a number above 0" if math.isinf(high) else f"a number in (0, {high:g}]"
    return _ranged(float, lambda value: 0 < value <= high, words)


def between(low: float, high: float) -> Callable[[str], float]:
    return _ranged(float, lambda value: low <= value <= high, f"a number in [{low:g}, {high:g}]")


def _ranged(kind: type[Number], fits: Callable[[Number], bool], words: str) -> Callable[[str], Number]:
    def read(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"must be {words}, not {text!r}")
        return value

    return read
