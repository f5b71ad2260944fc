"""A step of any shape as captured pieces of the layer loop, with the mixers between them.

A mixer runs uncaptured, because its work depends on the requests; it takes the real step, the pieces a padded one. A
piece ends with the mixer's write to its cache: the slots are in a buffer, so it can be captured.

    piece 0 → mixer 0 → piece 1 → mixer 1 → ... → piece L

L layers, T token rows (padded), N real ones.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from anabranch.compile.capture import capture
from anabranch.layers.mixer import Cache
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder, Parts
from anabranch.platforms import Platform

Start = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[Parts, list[torch.Tensor]]]
"""(token_T, position_T, num_tokens) → the layer loop for them, and the list to which it adds expert_TK of every MoE
layer."""


class Buffers:
    """What pieces and mixers pass to each other, for one padded size. All sizes share this memory: nothing in it is
    used after a step."""

    def __init__(self, model: Decoder, largest: int, device: torch.device, dtype: torch.dtype) -> None:
        # An even number of columns: kernels are compiled separately for rows that do not begin at 16-byte boundaries.
        shape = 2 + len(model.config.cache_groups), largest + largest % 2
        self.input = torch.zeros(shape, dtype=torch.int64, device=device)
        """token, position, the slots of each group"""
        self.num_tokens = torch.zeros((), dtype=torch.int32, device=device)
        mixers = [layer.mixer for layer in model.layers]
        self.shapes = [(mixer.written_shape, mixer.mixed_shape) for mixer in mixers]
        """Of each layer."""
        self.written, self.mixed = (
            torch.zeros(largest * max(map(math.prod, shapes)), dtype=dtype, device=device)
            for shapes in zip(*self.shapes)
        )
        self.width = self.mixed.shape[0] // largest
        """Numbers of a row of `mixed`, in the layer that has most."""

    def rows(self, layer_id: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The beginning of `written` and of `mixed` as `num_rows` rows of a layer."""
        written, mixed = self.shapes[layer_id]
        return (
            self.written[: num_rows * math.prod(written)].view(num_rows, *written),
            self.mixed[: num_rows * math.prod(mixed)].view(num_rows, *mixed),
        )


class PiecesStep:
    """The decoder for up to `size` token rows."""

    x_TD: torch.Tensor
    """Hidden rows, left by the last piece."""

    def __init__(
        self,
        platform: Platform,
        pool: Any,
        model: Decoder,
        caches: Sequence[Cache],
        buffers: Buffers,
        size: int,
        start: Start,
    ) -> None:
        self.model, self.caches, self.buffers, self.size, self.start = model, caches, buffers, size, start
        self.parts: Parts | None = None
        self.experts: list[torch.Tensor] = []
        """expert_TK of each MoE layer."""
        token_T, position_T, *slots = buffers.input[:, :size].unbind()
        self.padded = Step(
            token_T=token_T,
            position_T=position_T,
            query_start_R=buffers.num_tokens,  # mixers take the real step
            context_len_R=buffers.num_tokens,
            page_tables=(),
            slots=tuple(slots),
            logit_row=None,
            num_tokens=buffers.num_tokens,
        )
        self._fill(None)
        pieces = [partial(self._piece, layer_id) for layer_id in range(len(caches) + 1)]
        self.graphs = capture(platform, pool, pieces)

    def _piece(self, layer_id: int) -> None:
        """From the mixer of the layer before, whose rows are in the buffers, to the write of this layer's mixer. The
        last piece leaves x_TD."""
        try:
            if self.parts is None:
                padded = self.padded
                self.parts, self.experts = self.start(padded.token_T, padded.position_T, padded.num_tokens)
                cut = next(self.parts)
            else:
                cut = self.parts.send(self.buffers.rows(layer_id - 1, self.size)[1])
        except StopIteration as end:
            self.x_TD, self.parts = end.value, None
            return
        written, _ = self.buffers.rows(layer_id, self.size)
        written.copy_(self.model.write(cut, self.padded, self.caches))

    def run(self, step: Step) -> torch.Tensor:
        """Hidden rows x_ND of a step of at most `size` rows; they are valid until the next run."""
        num_rows, buffers = step.token_T.shape[0], self.buffers
        self._fill(step)
        views: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # of few shapes for many layers
        for layer_id, (graph, cache) in enumerate(zip(self.graphs, self.caches)):
            graph.replay()
            shapes = buffers.shapes[layer_id]
            if shapes not in views:
                views[shapes] = buffers.rows(layer_id, num_rows)
            written, mixed = views[shapes]
            mixed.copy_(self.model.layers[layer_id].mixer.mix(written, step, cache))
        self.graphs[-1].replay()
        return self.x_TD[:num_rows]

    def _fill(self, step: Step | None) -> None:
        """Put a step where the pieces find it. Padding rows are rows of zeros, so that nothing left there by an earlier
        step, NaN for example, reaches a router."""
        buffers, num_rows = self.buffers, 0 if step is None else step.token_T.shape[0]
        buffers.num_tokens.fill_(num_rows)
        buffers.input[:2, num_rows : self.size] = 0
        buffers.input[2:, num_rows : self.size] = -1
        if num_rows < self.size:
            buffers.mixed[: self.size * buffers.width].zero_()
        if step is not None:
            for row, values in zip(buffers.input, (step.token_T, step.position_T, *step.slots), strict=True):
                row[:num_rows].copy_(values)
