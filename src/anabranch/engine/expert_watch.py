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
        first_place = torch.arange(len(self.layers), device=device) * (num_experts + 1)
        self.first_place_L11 = first_place[:, None, None]

    def look(self, wanted: bool) -> list[torch.Tensor]:
        """From now on every layer adds its expert_TK to the list, or, if not wanted, none does."""
        seen: list[torch.Tensor] = []
        for layer in self.layers:
            layer.watch = seen.append if wanted else None
        return seen

    def count(self, seen: list[torch.Tensor]) -> None:
        """What `look` gave for one step joins the histogram."""
        expert_LTK = torch.stack(seen).long()
        expert_LTK = torch.where(expert_LTK < 0, self.count_LE.shape[1] - 1, expert_LTK)
        place = (self.first_place_L11 + expert_LTK).flatten()
        self.count_LE.view(-1).scatter_add_(0, place, torch.ones_like(place))
