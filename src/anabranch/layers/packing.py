"""Where a checkpoint's tensors go inside our packed parameters.

A module that packs several checkpoint tensors into one parameter says so in `layouts()`; every other parameter is
found under its own name. This file only names the shape of that statement; the loader acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

Index = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    name: str
    """Checkpoint name, relative to the module that holds the packing one."""
    index: Index = ()
    """Which part of the parameter it fills; () is all of it."""
    part: tuple[slice, ...] = ()
    """Which part of the checkpoint's tensor that is; () is all of it. Pieces of one tensor together are all of it."""


Layout = tuple[Piece, ...]
"""Pieces that together fill a parameter."""


@runtime_checkable
class Packed(Protocol):
    def layouts(self) -> dict[str, tuple[Layout, ...]]:
        """For each packed parameter, the ways a checkpoint may spell it."""
