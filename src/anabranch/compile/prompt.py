"""A step of one request as a few graphs, mixers included: attention kernels take lengths from the device, so what is
captured depends on the number of token rows alone.

One graph of all layers would take the host longer to launch than the device should wait: the first graph has few
layers, and the others are launched while it runs.

T token rows (padded).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from anabranch.compile.capture import capture
from anabranch.compile.pieces import Start
from anabranch.layers.mixer import Cache
from anabranch.layers.step import Step
from anabranch.models.decoder import Cut, Decoder, Parts
from anabranch.platforms import Platform

FIRST_LAYERS, MORE_LAYERS = 2, 8
"""Layers of the first graph and of each further one."""


class PromptStep:
    """The decoder for one request's step of up to a number of token rows."""

    def __init__(
        self,
        platform: Platform,
        pool: Any,
        model: Decoder,
        caches: Sequence[Cache],
        input: torch.Tensor,
        unpack: Callable[[torch.Tensor], Step],
        start: Start,
    ) -> None:
        """`input`, on the device, is padding alone, of which `unpack` makes a step."""
        self.model, self.caches, self.input, self.unpack, self.start = model, caches, input, unpack, start
        self.experts: list[torch.Tensor] = []
        """expert_TK of each MoE layer."""
        self.step: Step
        self.x_TD: torch.Tensor
        self.parts: Parts | None = None
        self.cut: Cut | None = None
        ends = [*range(FIRST_LAYERS, len(caches), MORE_LAYERS), len(caches)]
        graphs = [partial(self._layers, end - begin) for begin, end in pairwise([0, *ends])]
        self.graphs = capture(platform, pool, graphs)
        self.size = self.x_TD.shape[0]

    def _layers(self, count: int) -> None:
        """Run the layer loop over `count` mixers, to the cut after them; the last call leaves x_TD."""
        if self.parts is None:
            self.step = step = self.unpack(self.input)
            self.parts, self.experts = self.start(step.token_T, step.position_T, step.num_tokens)
            self.cut = next(self.parts)
        parts = self.parts
        for _ in range(count):
            assert self.cut is not None
            written = self.model.write(self.cut, self.step, self.caches)
            mixed = self.model.mix(self.cut, written, self.step, self.caches)
            self.cut = None  # its memory is for those that come after it
            del written
            try:
                self.cut = parts.send(mixed)
                del mixed
            except StopIteration as end:
                self.x_TD, self.parts = end.value, None

    def run(self, input: torch.Tensor) -> torch.Tensor:
        """Hidden rows x_TD, padding included, valid until the next run of any graph of the pool. `input` is in (pinned)
        host memory; nothing waits for the device."""
        self.input.copy_(input, non_blocking=True)
        for graph in self.graphs:
            graph.replay()
        return self.x_TD
