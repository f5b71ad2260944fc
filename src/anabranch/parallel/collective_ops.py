"""Collectives as ops with fakes, so that traced pieces of a model can contain them. A group goes by its name.

An op gives a new tensor; how is decided when it is called, not while it is traced. Traced pieces need no others.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from anabranch.ops.opaque import opaque

GROUPS: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""The Groups of this process."""


def _all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    return GROUPS[group].all_reduce(x.clone(memory_format=torch.contiguous_format))


def _all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return GROUPS[group].all_gather(x, dim).contiguous()


def _reduce_scatter(x: torch.Tensor, group: str) -> torch.Tensor:
    found: torch.Tensor = GROUPS[group].reduce_scatter(x)
    return found


def _fake_all_gather(x: torch.Tensor, dim: int, group: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:dim], GROUPS[group].size * x.shape[dim], *x.shape[dim + 1 :])


all_reduce = opaque("all_reduce", "(Tensor x, str group) -> Tensor", _all_reduce, lambda x, group: x.new_empty(x.shape))
all_gather = opaque("all_gather", "(Tensor x, int dim, str group) -> Tensor", _all_gather, _fake_all_gather)
reduce_scatter = opaque(
    "reduce_scatter",
    "(Tensor x, str group) -> Tensor",
    _reduce_scatter,
    lambda x, group: x.new_empty(x.shape[0] // GROUPS[group].size, *x.shape[1:]),
)
