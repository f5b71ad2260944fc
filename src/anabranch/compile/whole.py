"""A step of any shape as a few graphs, attention included: its kernels take lengths from the device, so what is
captured depends on the numbers of tokens and requests alone, and both are padded.

A graph of all layers takes the host long to launch, and the device would wait for that: so the first is of few layers.

T token rows, R requests, M page-table width; N and Q of them real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from anabranch.compile.capture import capture
from anabranch.layers.attention import KV
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder, Rope
from anabranch.platforms import Platform

FIRST_LAYERS, MORE_LAYERS = 2, 8
"""Layers of the first graph and of each further one."""


class Inputs:
    """Where captured steps find theirs. Sizes share memory: none is used after a step."""

    def __init__(self, num_groups: int, largest: int, most_requests: int, width: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = zeros(2 + num_groups, largest, dtype=torch.int64)
        """token, position, the slots of each group"""
        self.query_start = zeros(most_requests + 1)
        self.context_len = zeros(most_requests)
        self.tables = zeros(num_groups, most_requests, width)
        self.num_tokens = zeros()

    def step(self, size: int, num_requests: int) -> Step:
        token_T, position_T, *slots = self.rows[:, :size].unbind()
        return Step(
            token_T=token_T,
            position_T=position_T,
            query_start_R=self.query_start[: num_requests + 1],
            context_len_R=self.context_len[:num_requests],
            page_tables=tuple(table_RM[:num_requests] for table_RM in self.tables.unbind()),
            slots=tuple(slots),
            logit_row=None,
            max_query=size,
            num_tokens=self.num_tokens,
        )

    def fill(self, step: Step, size: int, num_requests: int) -> None:
        """Padding rows go nowhere; padding requests have no tokens and no context."""
        N, Q = step.token_T.shape[0], step.context_len_R.shape[0]
        self.rows[:2, N:size] = 0
        self.rows[2:, N:size] = -1
        for row, values in zip(self.rows, (step.token_T, step.position_T, *step.slots), strict=True):
            row[:N].copy_(values)
        self.query_start[: Q + 1].copy_(step.query_start_R)
        self.query_start[Q + 1 : num_requests + 1] = N
        self.context_len[:Q].copy_(step.context_len_R)
        self.context_len[Q:num_requests] = 0
        for own, table in zip(self.tables, step.page_tables, strict=True):
            own[:Q, : table.shape[1]].copy_(table)
        self.num_tokens.fill_(N)

    def clear(self) -> None:
        self.rows[:2] = 0
        self.rows[2:] = -1
        for tensor in (self.query_start, self.context_len, self.num_tokens):
            tensor.zero_()


class WholeStep:
    """The decoder for up to `size` token rows of up to `num_requests` requests."""

    def __init__(
        self,
        platform: Platform,
        pool: Any,
        model: Decoder,
        kv: Sequence[KV],
        inputs: Inputs,
        size: int,
        num_requests: int,
        look: Callable[[], list[torch.Tensor]],
    ) -> None:
        """`look()` gives a list that every MoE layer then adds its expert_TK to."""
        self.inputs = inputs
        self.size, self.num_requests = size, num_requests
        self.experts: list[torch.Tensor] = []
        """expert_TK of each MoE layer."""
        self.model, self.kv, self.look = model, kv, look
        self.step = inputs.step(size, num_requests)
        self.ropes: list[Rope] = []
        self.residual_TD: torch.Tensor | None = None
        inputs.clear()
        ends = [*range(FIRST_LAYERS, len(kv), MORE_LAYERS), len(kv)]
        parts = [partial(self._layers, *pair) for pair in pairwise([0, *ends])]
        for part in parts:  # once uncaptured: kernels are compiled and libraries take their workspace when first used
            part()
        self.graphs = [capture(platform, part, pool) for part in parts]

    def _layers(self, begin: int, end: int) -> None:
        model, step = self.model, self.step
        if begin == 0:
            self.experts = self.look()
            self.x_TD, self.ropes = model.enter(step.token_T, step.position_T)
            self.residual_TD = None
        for layer_id in range(begin, end):
            self.x_TD, self.residual_TD = model.layer(
                layer_id, self.x_TD, self.residual_TD, self.ropes, step, self.kv[layer_id]
            )
        if end == len(self.kv):
            self.x_TD = model.leave(self.x_TD, self.residual_TD)

    def run(self, step: Step) -> torch.Tensor:
        """Hidden rows x_ND of a step of at most `size` rows; they stand until the next run."""
        self.inputs.fill(step, self.size, self.num_requests)
        for graph in self.graphs:
            graph.replay()
        return self.x_TD[: step.token_T.shape[0]]
