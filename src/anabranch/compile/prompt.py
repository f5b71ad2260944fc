"""A step of one request as a few graphs, attention included: its kernels take lengths from the device, so what is
captured depends on the number of token rows alone.

One graph of all layers would take the host longer to launch than the device should wait: the first is of few layers,
and the others are launched while it runs.

T token rows (padded).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from anabranch.compile.capture import capture
from anabranch.layers.attention import KV
from anabranch.layers.norm import Hidden
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder, Rope
from anabranch.platforms import Platform

FIRST_LAYERS, MORE_LAYERS = 2, 8
"""Layers of the first graph and of each further one."""


class PromptStep:
    """The decoder for one request's step of up to so many token rows."""

    def __init__(
        self,
        platform: Platform,
        pool: Any,
        model: Decoder,
        kv: Sequence[KV],
        input: torch.Tensor,
        unpack: Callable[[torch.Tensor], Step],
        look: Callable[[], list[torch.Tensor]],
    ) -> None:
        """`input`, on the device, is padding alone, of which `unpack` makes a step. `look()` gives a list that every
        MoE layer then adds its expert_TK to."""
        self.input = input
        self.experts: list[torch.Tensor] = []
        """expert_TK of each MoE layer."""
        self.model, self.kv, self.unpack, self.look = model, kv, unpack, look
        self.step: Step
        self.ropes: list[Rope] = []
        self.x: Hidden
        self.x_TD: torch.Tensor
        self.residual_TD: torch.Tensor | None = None
        ends = [*range(FIRST_LAYERS, len(kv), MORE_LAYERS), len(kv)]
        parts = [partial(self._layers, *pair) for pair in pairwise([0, *ends])]
        for part in parts:  # once uncaptured: kernels are compiled and libraries take their workspace when first used
            part()
        self.size = self.x_TD.shape[0]
        self.graphs = [capture(platform, part, pool) for part in parts]

    def _layers(self, begin: int, end: int) -> None:
        model = self.model
        if begin == 0:
            self.experts = self.look()
            self.step = self.unpack(self.input)
            self.x, self.ropes = model.enter(self.step.token_T, self.step.position_T)
            self.residual_TD = None
        for layer_id in range(begin, end):
            self.x, self.residual_TD = model.layer(
                layer_id, self.x, self.residual_TD, self.ropes, self.step, self.kv[layer_id]
            )
        if end == len(self.kv):
            self.x = self.x_TD = model.leave(self.x, self.residual_TD)
            self.residual_TD = None  # else no other graph could have its memory

    def run(self, input: torch.Tensor) -> torch.Tensor:
        """Hidden rows x_TD, padding included; they stand until the next run of any graph of the pool. `input` lies in
        (pinned) host memory; nothing waits for the device."""
        self.input.copy_(input, non_blocking=True)
        for graph in self.graphs:
            graph.replay()
        return self.x_TD
