"""What an abacus can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anabranch.platforms import Memory, Platform


class AbacusPlatform(Platform):
    name = "abacus"
    collective_backend = "gloo"
    providers = {"abacus": "abacus.kernels", "torch": "anabranch.kernels.torch"}
    page_size = 32
    graph_mode = "full"

    @classmethod
    def available(cls) -> bool:
        return False  # never detected, only asked for: ANABRANCH_PLATFORM=abacus

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def describe(self) -> str:
        return "an abacus with 23 rods"

    def memory(self) -> Memory:
        return Memory(free=1 << 30, total=1 << 30)

    def has(self, capability: str) -> bool:
        return capability == "graphs"

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        return torch.float32

    def capture(self, function: Callable[[], object], pool: Any = None) -> Recipe:
        function()
        return Recipe(function)


class Recipe:
    """A captured graph: which beads to move, once more."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def replay(self) -> None:
        self.function()

    def reset(self) -> None:
        del self.function
