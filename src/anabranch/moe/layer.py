"""One MoE layer: fork the shared expert, route, dispatch, experts, combine, join.

T tokens, D hidden width, E experts, K experts per token, M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Linear
from anabranch.layers.mlp import MLP
from anabranch.layers.norm import Hidden, UnreducedRows
from anabranch.moe.dispatch import ExchangingDispatcher, FilteringDispatcher, Slots
from anabranch.moe.experts import Experts
from anabranch.moe.setup import MoESetup, overlap
from anabranch.ops.weight import Weight
from anabranch.parallel.placement import in_order

if TYPE_CHECKING:
    from anabranch.moe.config import MoEConfig


class Router(nn.Module):
    """A linear map to expert logits, kept in fp32: rounding them would tie experts that are not tied."""

    def __init__(self, config: MoEConfig, width: int) -> None:
        super().__init__()
        self.weight = Weight((config.num_experts, width))
        self.e_score_correction_bias: nn.Parameter | None = None
        if config.selection_bias:  # in fp32 always: probabilities differ by little
            self.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32))
        self.bias = Weight((config.num_experts,)) if config.bias else None
        self.top_k = config.top_k
        self.score = config.score
        self.renormalize = config.renormalize
        self.groups = config.num_groups, config.top_groups
        self.scaling = config.scaling

    def forward(self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight_TK, expert_TK); rows from `num_tokens` on go to no expert."""
        bias_E = None if self.bias is None else self.bias.data
        logits_TE = ops.linear(x_TD, self.weight, bias_E, out_dtype=torch.float32)
        call = ops.RouteCall(
            logits_TE,
            self.top_k,
            self.score,
            self.renormalize,
            self.e_score_correction_bias,
            *self.groups,
            self.scaling,
            num_tokens=num_tokens,
        )
        return ops.route(call)


class RoutedExperts(nn.Module):
    """Route, dispatch, experts, combine."""

    def __init__(self, router: nn.Module, config: MoEConfig, width: int, activation: str, setup: MoESetup) -> None:
        super().__init__()
        self.router = router
        self.group, exchange = setup.group, setup.exchange
        ranks = self.group if exchange is None else exchange.group
        holds: tuple[int, ...] = ()
        self.dispatcher = setup.dispatcher
        self.slots: Slots | None = None
        """Of experts that are divided among ranks."""
        if setup.expert_parallel and ranks.size > 1:
            placement = in_order(config.num_experts, ranks.size, setup.expert_slots)
            holds, slots = placement.experts[ranks.rank], Slots(placement, config.num_experts)
            self.slots, self.dispatcher = slots, FilteringDispatcher(ranks.rank, slots)
            if exchange is not None:
                self.dispatcher = ExchangingDispatcher(exchange, slots)
        self.experts = Experts(config, width, activation, setup.combine, ranks, holds)
        self.on_route: Callable[[torch.Tensor], None] | None = None
        """Called with expert_TK of every step, if set."""

    def forward(
        self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None = None, router_input_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows from `num_tokens` on are padding. The router reads x unless it has an input of its own."""
        return self.group.all_reduce(self.partial(x_TD, num_tokens, router_input_TD))

    def partial(
        self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None, router_input_TD: torch.Tensor | None
    ) -> torch.Tensor:
        """This rank's term of the sum over ranks."""
        weight_TK, expert_TK = self.route(x_TD if router_input_TD is None else router_input_TD, num_tokens)
        x_MD, dispatched = self.dispatcher.dispatch(x_TD, weight_TK, expert_TK)
        return self.dispatcher.combine(self.experts(x_MD, dispatched), dispatched)

    def route(self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(weight_TK, expert_TK) of the experts that the tokens visit."""
        weight_TK, expert_TK = self.router(x_TD, num_tokens)
        if self.on_route is not None:
            self.on_route(expert_TK)
        return weight_TK, expert_TK


class MoELayer(RoutedExperts):
    """Routed experts and, where the family has one, the shared expert, on the side stream or after them."""

    def __init__(self, config: MoEConfig, width: int, activation: str, setup: MoESetup) -> None:
        super().__init__(Router(config, width), config, width, activation, setup)
        self.shared_expert = None
        if config.shared_width:
            self.shared_expert = MLP(width, config.shared_width, activation, group=setup.group, partial=True)
        self.shared_expert_gate = Linear(width, 1) if config.shared_gate else None
        self.side_stream = setup.side_stream
        self.reduce_in_norm: int | None = None
        if self.shared_expert is None and self.dispatcher.is_local and setup.group.size == 1:
            self.reduce_in_norm = setup.reduce_in_norm

    def forward(
        self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None = None, router_input_TD: torch.Tensor | None = None
    ) -> torch.Tensor:
        shared_expert, gate = self.shared_expert, self.shared_expert_gate
        if shared_expert is None:
            return super().forward(x_TD, num_tokens, router_input_TD)
        routed_TD, (shared_TD, gate_T1) = overlap(
            self.side_stream,
            x_TD,
            main=lambda x: self.partial(x, num_tokens, router_input_TD),
            side=lambda x: (shared_expert(x), None if gate is None else gate(x)),
        )
        y_TD = routed_TD + shared_TD if gate_T1 is None else ops.add_gated(routed_TD, shared_TD, gate_T1)
        return self.group.all_reduce(y_TD)

    def forward_to_norm(self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None) -> Hidden:
        """`forward` for a result that goes to a norm, which may sum the experts' rows itself while it reads them."""
        # is_compiling first: a traced number of tokens must not be compared.
        if torch.compiler.is_compiling() or self.reduce_in_norm is None or x_TD.shape[0] <= self.reduce_in_norm:
            return self(x_TD, num_tokens)  # type: ignore[no-any-return]
        x_MD, dispatched = self.dispatcher.dispatch(x_TD, *self.route(x_TD, num_tokens))
        return UnreducedRows(self.experts(x_MD, dispatched, combined=False), dispatched.expert_MK)
