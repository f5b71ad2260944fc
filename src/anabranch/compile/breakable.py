"""Pieces without a compiler: a capture ends where attention begins and the next one goes on behind it.

Nothing is traced: a piece is the part of the decoder between two attentions, run once while the platform captures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anabranch.compile.pieces import Buffers, StepInPieces
from anabranch.layers.attention import KV
from anabranch.layers.norm import Hidden
from anabranch.models.decoder import Decoder, Rope
from anabranch.platforms import Platform


class BreakableStep(StepInPieces):
    def __init__(
        self,
        platform: Platform,
        pool: Any,
        model: Decoder,
        kv: Sequence[KV],
        buffers: Buffers,
        size: int,
        look: Callable[[], list[torch.Tensor]],
    ) -> None:
        """`look()` gives a list that every MoE layer then adds its expert_TK to."""
        self.look = look
        self.residual_TD: torch.Tensor | None = None
        self.ropes: list[Rope] = []
        super().__init__(platform, pool, model, kv, buffers, size)

    def piece(self, layer_id: int) -> None:
        model, step = self.model, self.padded
        x: Hidden
        if layer_id == 0:
            self.experts = self.look()
            x, self.ropes = model.enter(step.token_T, step.position_T)
            self.residual_TD = None
        else:
            assert self.residual_TD is not None
            attended_THD = self.attended(layer_id - 1)
            x, self.residual_TD = model.after(layer_id - 1, attended_THD, self.residual_TD, step.num_tokens)
        if layer_id == len(self.kv):
            self.x_TD = model.leave(x, self.residual_TD)
            return
        heads, self.residual_TD = model.before(layer_id, x, self.residual_TD)
        self.store(layer_id, heads, self.ropes[model.rope_of_layer[layer_id]])
