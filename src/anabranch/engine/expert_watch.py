"""Looks at which experts tokens went to: a histogram on the device, and the ids themselves for requests that ask.

L MoE layers, T token rows, K experts per token, E experts.
"""

from __future__ import annotations

import torch
from torch import nn

from anabranch.moe.layer import RoutedExperts


class ExpertWatch:
    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        num_experts = max((layer.experts.num_experts for layer in self.layers), default=0)
        # The last column takes the −1 of padding rows.
        self.count_LE = torch.zeros(len(self.layers), num_experts + 1, dtype=torch.int64, device=device)
        self.seen: list[torch.Tensor] = []

    def begin(self, *, count: bool, record: bool) -> None:
        """From now on count tokens per expert, or keep the ids, or both, or neither (which costs nothing)."""
        self.seen = []
        for layer_id, layer in enumerate(self.layers):
            layer.watch = self._watcher(layer_id, count, record) if count or record else None

    def _watcher(self, layer_id: int, count: bool, record: bool):  # type: ignore[no-untyped-def]
        row_E = self.count_LE[layer_id]

        def watch(expert_TK: torch.Tensor) -> None:
            if record:
                self.seen.append(expert_TK)
            if count:
                expert = expert_TK.flatten().long()
                expert = torch.where(expert < 0, row_E.shape[0] - 1, expert)
                row_E.scatter_add_(0, expert, torch.ones_like(expert))

        return watch

    def routed_TLK(self) -> torch.Tensor | None:
        """The ids of the step that just ran, if they were recorded."""
        return torch.stack(self.seen, dim=1) if self.seen else None
