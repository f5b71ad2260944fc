"""Which experts tokens go to: a histogram on the device that counts every token of every step, copied to the host now
and then; and the ids themselves for requests that ask.

L MoE layers, T token rows, K experts per token, E experts.
"""

from __future__ import annotations

import torch
from torch import nn

from anabranch import ops
from anabranch.moe.layer import RoutedExperts
from anabranch.platforms import Fetch, Platform


class ExpertWatch:
    def __init__(self, model: nn.Module, platform: Platform, interval: int = 0) -> None:
        """A copy to the host every `interval` steps; 0: nothing is counted."""
        self.platform = platform
        self.interval = interval
        self.layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        self.counts = bool(interval and self.layers)
        num_experts = max((layer.experts.num_experts for layer in self.layers), default=0)
        # Never replaced: captured graphs add to it.
        self.count_LE = torch.zeros(len(self.layers), num_experts, dtype=torch.int64, device=platform.device)
        self.num_steps = 0
        """Since the last copy."""
        self.fetch: Fetch | None = None

    def look(self, wanted: bool) -> list[torch.Tensor]:
        """From now on every layer adds its expert_TK to the list, or, if not wanted, none does."""
        seen: list[torch.Tensor] = []
        for layer in self.layers:
            layer.on_route = seen.append if wanted else None
        return seen

    def count(self, seen: list[torch.Tensor]) -> None:
        """What `look` gave for one step joins the histogram. Can be captured."""
        if self.counts:
            ops.count_experts(torch.stack(seen), self.count_LE)

    def end_step(self) -> None:
        """A step that was counted has been launched."""
        self.num_steps += 1
        if self.counts and self.num_steps >= self.interval:
            self._copy()

    def load(self, settled: bool) -> list[list[int]]:
        """Tokens by MoE layer and expert, as of the last copy. `settled`: no step is on its way, so that a copy of what
        is counted by now makes nobody wait."""
        if settled and self.counts and self.num_steps:
            self._copy()
        return [] if self.fetch is None else self.fetch.wait().tolist()

    def _copy(self) -> None:
        self.num_steps = 0
        self.fetch = self.platform.fetch(self.count_LE)
