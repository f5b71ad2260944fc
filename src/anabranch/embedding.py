"""Embeddings: what the engine is asked for, and its vectors as plain numbers. Knows no HTTP."""

from __future__ import annotations

from array import array
from math import hypot
from typing import Any, get_args

from anabranch.request import Pooling
from anabranch.sampling_params import SamplingParams

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
"""Of a request with `pooling`."""


def check(pooling: Any, dimensions: Any, hidden_size: int) -> None:
    """ValueError for values that no request can have; its message begins with the parameter's name."""
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, not {pooling!r}")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= hidden_size):
        raise ValueError(f"dimensions must lie in [1, {hidden_size}], the model's hidden size, not {dimensions!r}")


def shorten(vector: bytes, dimensions: int | None) -> array[float]:
    """An Update's embedding; with `dimensions` the first so many numbers of it, normalised again."""
    numbers = array("f", vector)
    if dimensions is None or dimensions == len(numbers):
        return numbers
    length = hypot(*numbers[:dimensions]) or 1.0
    return array("f", (number / length for number in numbers[:dimensions]))
