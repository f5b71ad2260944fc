"""What mixes the tokens of a request in a layer: a contract. Attention is one mixer; others may keep a state instead.

A layer is a part that computes each row by itself, then a mixer, then again such a part. The layer loop can be cut in
the middle of the mixer, between `write` and `mix`: everything up to `write` depends on nothing but the rows of the
step, so it can be captured for a padded number of rows; `mix` depends on the requests they belong to.

T token rows, W hidden width.
"""

from __future__ import annotations

from typing import Protocol

import torch

from anabranch.layers.step import Step

Cache = tuple[torch.Tensor, ...]
"""What a layer's mixer keeps between steps: pages of keys and values, or states."""
Rope = tuple[torch.Tensor, ...]
"""(cos_TF, sin_TF); empty for a mixer without rotary positions."""


class Mixer(Protocol):
    cache_group: int
    """Which of a step's page tables and slots belong to this mixer's cache."""

    @property
    def written_shape(self) -> tuple[int, ...]:
        """Of one row of what `write` returns."""

    @property
    def mixed_shape(self) -> tuple[int, ...]:
        """Of one row of what `mix` returns."""

    def project(self, x_TW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the mixer needs of each row, each of these tensors with T rows."""

    def write(self, projected: tuple[torch.Tensor, ...], rope: Rope, step: Step, cache: Cache) -> torch.Tensor:
        """Write to the cache what later tokens need of each row (padding, with slot −1, writes nothing); the rest, such
        as queries, is returned for `mix`."""

    def mix(self, written: torch.Tensor, step: Step, cache: Cache) -> torch.Tensor:
        """Each row with what it takes from earlier tokens of its request."""

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        """x_TW of the mixer's result."""
