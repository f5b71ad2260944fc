"""Which experts tokens go to: a histogram on the device that counts every token of every step, copied to the host
every few steps; and the ids themselves for requests that ask for them.

L MoE layers, T token rows, K experts per token, E experts.
"""

import torch
from torch import nn

from anabranch import ops
from anabranch.moe.layer import RoutedExperts
from anabranch.platforms import Fetch, Platform


class ExpertCounter:
    def __init__(self, model: nn.Module, platform: Platform, interval: int = 0) -> None:
        """A copy to the host every `interval` steps; 0: nothing is counted."""
        self.platform = platform
        self.interval = interval
        layers = ((name, module) for name, module in model.named_modules() if isinstance(module, RoutedExperts))
        self.layers = [module for name, module in layers if not name.startswith("mtp.")]
        self.counts = bool(interval and self.layers)
        num_experts = max((layer.experts.num_experts for layer in self.layers), default=0)
        # Never replaced: captured graphs add to it.
        self.count_LE = torch.zeros(len(self.layers), num_experts, dtype=torch.int64, device=platform.device)
        self.num_steps = 0
        """Since the last copy."""
        self.fetch: Fetch | None = None

    def record(self, enabled: bool) -> list[torch.Tensor]:
        """A list to which every MoE layer adds its expert_TK from now on; not `enabled`: no layer does."""
        recorded: list[torch.Tensor] = []
        for layer in self.layers:
            layer.on_route = recorded.append if enabled else None
        return recorded

    def count(self, recorded: list[torch.Tensor]) -> None:
        """Add what was recorded in one step to the histogram. Can be captured."""
        if self.counts:
            ops.count_experts(torch.stack(recorded), self.count_LE)

    def end_step(self) -> None:
        """A step that was counted has been launched."""
        self.num_steps += 1
        if self.counts and self.num_steps >= self.interval:
            self._copy()

    def load(self, settled: bool) -> list[list[int]]:
        """Tokens by MoE layer and expert, as of the last copy. `settled`: no step is in flight, so that a new copy
        does not have to wait."""
        if settled and self.counts and self.num_steps:
            self._copy()
        return [] if self.fetch is None else self.fetch.wait().tolist()

    def _copy(self) -> None:
        self.num_steps = 0
        self.fetch = self.platform.fetch(self.count_LE)
