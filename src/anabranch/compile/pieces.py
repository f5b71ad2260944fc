"""A step of any shape as captured pieces with attention between them; what a piece is, is for others to say.

Attention runs uncaptured, because its work depends on the requests; it takes the real step, the pieces a padded one.
A piece ends with the KV write: its slots stand in a buffer, so it can be captured.

    piece 0 → attention 0 → piece 1 → attention 1 → ... → piece L

L layers, T token rows (padded), N real ones.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from anabranch.compile.capture import capture
from anabranch.layers.attention import KV
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder, Rope
from anabranch.platforms import Graph, Platform


class Buffers:
    """What pieces and attention hand each other, for one padded size. Sizes share memory: none is used after a step."""

    def __init__(self, model: Decoder, largest: int, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        # An even number of columns: kernels are compiled apart for rows that do not begin at multiples of 16 bytes.
        shape = 2 + len(model.config.cache_groups), largest + largest % 2
        self.input = torch.zeros(shape, dtype=torch.int64, device=device)
        """token, position, the slots of each group"""
        self.num_tokens = torch.zeros((), dtype=torch.int32, device=device)
        heads = {layer.attention.num_heads * layer.attention.head_dim for layer in model.config.layers}
        self.q, self.attended = (torch.zeros(largest * max(heads), dtype=dtype, device=device) for _ in range(2))

    def heads(self, layer_id: int) -> tuple[int, int]:
        """(query heads, head dim)"""
        attention = self.model.config.layers[layer_id].attention
        return attention.num_heads, attention.head_dim

    def rows(self, flat: torch.Tensor, heads: tuple[int, int], num_rows: int) -> torch.Tensor:
        """The beginning of `q` or `attended` as rows of such heads."""
        return flat[: num_rows * heads[0] * heads[1]].view(num_rows, *heads)


class StepInPieces(abc.ABC):
    """The decoder for up to `size` token rows."""

    x_TD: torch.Tensor
    """Hidden rows, left by the last piece."""

    def __init__(
        self, platform: Platform, pool: Any, model: Decoder, kv: Sequence[KV], buffers: Buffers, size: int
    ) -> None:
        self.model = model
        self.kv = kv
        self.buffers = buffers
        self.size = size
        self.experts: list[torch.Tensor] = []
        """expert_TK of each MoE layer."""
        token_T, position_T, *slots = buffers.input[:, :size].unbind()
        self.padded = Step(
            token_T=token_T,
            position_T=position_T,
            query_start_R=buffers.num_tokens,  # attention takes the real step
            context_len_R=buffers.num_tokens,
            page_tables=(),
            slots=tuple(slots),
            logit_row=None,
            num_tokens=buffers.num_tokens,
        )
        self._fill(None)
        pieces = [partial(self.piece, layer_id) for layer_id in range(len(kv) + 1)]
        for piece in pieces:  # once uncaptured: kernels are compiled and libraries take their workspace when first used
            piece()
        self.graphs: list[Graph] = []
        for piece in pieces:
            self.graphs.append(capture(platform, piece, pool))

    @abc.abstractmethod
    def piece(self, layer_id: int) -> None:
        """From attention `layer_id` − 1, which left its rows in the buffers, to `store` of `layer_id`;
        the last one leaves x_TD."""

    def attended(self, layer_id: int) -> torch.Tensor:
        return self.buffers.rows(self.buffers.attended, self.buffers.heads(layer_id), self.size)

    def store(self, layer_id: int, heads: torch.Tensor, rope: Rope) -> None:
        """The end of a piece: keys and values go into the pages, queries to where attention finds them."""
        q_THD = self.model.store(layer_id, heads, rope, self.padded, self.kv[layer_id])
        self.buffers.rows(self.buffers.q, self.buffers.heads(layer_id), self.size).copy_(q_THD)

    def run(self, step: Step) -> torch.Tensor:
        """Hidden rows x_ND of a step of at most `size` rows; they stand until the next run."""
        num_rows, buffers = step.token_T.shape[0], self.buffers
        self._fill(step)
        views: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # of few shapes for many layers
        for layer_id, layer_kv in enumerate(self.kv):
            self.graphs[layer_id].replay()
            shape = buffers.heads(layer_id)
            if shape not in views:
                views[shape] = buffers.rows(buffers.q, shape, num_rows), buffers.rows(buffers.attended, shape, num_rows)
            q_NHD, attended_NHD = views[shape]
            attended_NHD.copy_(self.model.attend(layer_id, q_NHD, step, layer_kv))
        self.graphs[-1].replay()
        return self.x_TD[:num_rows]

    def _fill(self, step: Step | None) -> None:
        """Put a step where the pieces find it. Padding rows are rows of zeros: nothing that stood there before, NaN for
        one, reaches a router."""
        buffers, num_rows = self.buffers, 0 if step is None else step.token_T.shape[0]
        buffers.num_tokens.fill_(num_rows)
        buffers.input[:2, num_rows : self.size] = 0
        buffers.input[2:, num_rows : self.size] = -1
        if num_rows < self.size:
            buffers.attended.zero_()
        if step is not None:
            for row, values in zip(buffers.input, (step.token_T, step.position_T, *step.slots), strict=True):
                row[:num_rows].copy_(values)
