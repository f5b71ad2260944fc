"""One MoE layer: fork the shared expert, route, dispatch, experts, combine, join.

T tokens, D hidden width, K experts per token, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Linear
from anabranch.layers.mlp import MLP
from anabranch.layers.norm import Carried, Rows
from anabranch.moe.dispatch import Dispatcher, LocalDispatcher
from anabranch.moe.experts import Experts
from anabranch.moe.router import Router
from anabranch.moe.shared_expert import SIDE_TOKENS, always_on, beside

if TYPE_CHECKING:
    from anabranch.models.config import MoEConfig
    from anabranch.platforms import SideStream


SUM_LATER = 64
"""Of more tokens the kernels have no better way than to write all rows and to sum them; the norm behind this layer does
that while it reads. 8,192 tokens of Qwen3-30B-A3B then move 369 MB a layer for both, not 436."""


class RoutedExperts(nn.Module):
    """Route, dispatch, experts, combine."""

    def __init__(self, router: nn.Module, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.watch: Callable[[torch.Tensor], None] | None = None
        """Is shown expert_TK; None: nobody looks."""

    def forward(
        self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None = None, router_input_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows from `num_tokens` on are padding. The router reads x unless it has an input of its own."""
        weight_TK, expert_TK = self.choose(x_TD, num_tokens, router_input_TD)
        rows_MD, plan = self.dispatcher.dispatch(x_TD, weight_TK, expert_TK)
        rows_MD = self.experts(rows_MD, plan)
        return self.dispatcher.combine(rows_MD, plan)

    def choose(
        self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None, router_input_TD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight_TK, expert_TK) of all experts that the tokens visit."""
        weight_TK, expert_TK = self.router(x_TD if router_input_TD is None else router_input_TD, num_tokens)
        if self.watch is not None:
            self.watch(expert_TK)
        return self.visited(x_TD, weight_TK, expert_TK)

    def visited(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All experts that the tokens visit, given those that the router chose."""
        return weight_TK, expert_TK


class MoELayer(RoutedExperts):
    """Routed experts and, where the family has one, the shared expert: on the side stream, in line or packed."""

    def __init__(self, config: MoEConfig, width: int, activation: str, side_stream: SideStream) -> None:
        super().__init__(Router(config, width), Experts(config.num_experts, width, config.width, activation))
        self.shared_expert = MLP(width, config.shared_width, activation) if config.shared_width else None
        self.shared_expert_gate = Linear(width, 1) if config.shared_gate else None
        self.side_stream = side_stream
        self.side_tokens: int | None = SIDE_TOKENS
        self.sum_later: int | None = None
        """Of more tokens than so many a norm behind this layer may sum the experts' rows; None: never."""

    def pack_shared_expert(self) -> None:
        """Make the shared expert some of the experts, visited by every token. Before weights are loaded."""
        assert self.shared_expert is not None
        width, inner = self.shared_expert.down_proj.weight.shape[1], self.experts.down_EDI.shape[2]
        if width % inner:
            raise ValueError(
                f"shared_expert packed: its width, {width}, is not a multiple of an expert's, {inner}; use stream"
            )
        self.experts.add_shared(width // inner)
        self.shared_expert = None

    def visited(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        experts, gate = self.experts, self.shared_expert_gate
        if not experts.num_shared:
            return weight_TK, expert_TK
        weight_T1 = None if gate is None else torch.sigmoid(gate(x_TD).float())
        return always_on(experts.num_experts, experts.num_shared, weight_T1, weight_TK, expert_TK)

    def forward(
        self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None = None, router_input_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        shared_expert, gate, routed = self.shared_expert, self.shared_expert_gate, super().forward
        if shared_expert is None:
            return routed(x_TD, num_tokens, router_input_TD)
        routed_TD, (shared_TD, gate_T1) = beside(
            self.side_stream,
            x_TD,
            main=lambda x: routed(x, num_tokens, router_input_TD),
            side=lambda x: (shared_expert(x), None if gate is None else gate(x)),
            most_tokens=self.side_tokens,
        )
        return routed_TD + shared_TD if gate_T1 is None else ops.add_gated(routed_TD, shared_TD, gate_T1)

    def hand_on(self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None) -> Carried:
        """`forward` for whoever gives the result to a norm: its sum over experts may be left to that one, which then
        reads the rows instead of their sum."""
        if (
            torch.compiler.is_compiling()  # first: a traced number of tokens must not be looked at
            or self.sum_later is None
            or x_TD.shape[0] <= self.sum_later
            or self.shared_expert is not None
            or type(self.dispatcher) is not LocalDispatcher
        ):
            return self(x_TD, num_tokens)  # type: ignore[no-any-return]
        rows_MD, plan = self.dispatcher.dispatch(x_TD, *self.choose(x_TD, num_tokens))
        return Rows(self.experts.unsummed(rows_MD, plan), plan.expert_MK)
