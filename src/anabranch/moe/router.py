"""Which experts a token visits. T tokens, D hidden width, E experts, K per token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.ops.weight import Weight

if TYPE_CHECKING:
    from anabranch.models.config import MoEConfig


class Router(nn.Module):
    """A linear map to expert logits, kept in fp32: rounding them would tie experts that are not tied."""

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.weight = Weight((config.num_experts, width))
        self.top_k = config.top_k
        self.renormalize = config.renormalize

    def forward(self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight_TK, expert_TK); rows from `num_tokens` on go to no expert."""
        logits_TE = ops.linear(x_TD, self.weight, out_dtype=torch.float32)
        return ops.route(ops.RouteCall(logits_TE, self.top_k, renormalize=self.renormalize, num_tokens=num_tokens))
