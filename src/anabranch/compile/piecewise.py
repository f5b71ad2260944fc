"""Pieces made by a compiler: the decoder is traced once, split at its attentions, and each piece is compiled for any
number of tokens; then captured per padded size, or called as it is for sizes that are not.

The shared expert of a compiled piece is in line with the others: a compiler knows one stream.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from anabranch.compile.compiler import PieceCompiler
from anabranch.compile.pieces import Buffers, StepInPieces
from anabranch.compile.split import split
from anabranch.compile.trace import trace
from anabranch.layers.attention import KV
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder, Rope
from anabranch.platforms import Platform

log = logging.getLogger(__name__)

Values = dict[str, Any]
"""Tensors (and numbers of rows) by their names in the traced graph."""


class CompiledDecoder:
    """A model's pieces, for any number of tokens but one."""

    def __init__(self, model: Decoder, compiler: PieceCompiler) -> None:
        self.model = model
        self.traced = trace(model, look_into=compiler.compiler != "none")
        self.split = split(self.traced)
        self.functions = [compiler.function(piece) for piece in self.split.pieces]
        log.info(
            "%d pieces, %d of them different: %d compiled, %d loaded",
            *(len(self.functions), len(compiler.functions), compiler.num_compiled, compiler.num_loaded),
        )
        self.no_padding = torch.full((), 2**31 - 1, dtype=torch.int32, device=model.embed_tokens.weight.device)

    def begin(self, token_T: torch.Tensor, position_T: torch.Tensor, num_tokens: torch.Tensor) -> Values:
        traced = self.traced
        values = {traced.token: token_T, traced.position: position_T}
        if traced.num_tokens is not None:
            values[traced.num_tokens] = num_tokens
        return {**self.split.constants, **values, **dict.fromkeys(traced.sizes, token_T.shape[0])}

    def piece(self, place: int, values: Values) -> list[torch.Tensor]:
        """Run one piece on values; expert_TK of its routers."""
        piece = self.split.pieces[place]
        outputs = self.functions[place](*(values[name] for name in piece.inputs))
        values.update(zip(piece.outputs, outputs, strict=True))
        return [values[name] for name in piece.experts]

    def heads(self, place: int, values: Values) -> tuple[torch.Tensor, Rope]:
        """What the piece left for the attention behind it."""
        attention = self.split.attentions[place]
        return values[attention.heads], (values[attention.cos], values[attention.sin])

    def forget(self, place: int, values: Values) -> None:
        for name in self.split.finished[place]:
            values.pop(name, None)

    def run(self, step: Step, kv: Sequence[KV]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(x_TD, expert_TK of each MoE layer), nothing of it captured."""
        num_tokens = self.no_padding if step.num_tokens is None else step.num_tokens
        values = self.begin(step.token_T, step.position_T, num_tokens)
        experts: list[torch.Tensor] = []
        for layer_id, layer_kv in enumerate(kv):
            experts += self.piece(layer_id, values)
            q_THD = self.model.store(layer_id, *self.heads(layer_id, values), step, layer_kv)
            self.forget(layer_id, values)
            values[self.split.attentions[layer_id].attended] = self.model.attend(layer_id, q_THD, step, layer_kv)
        experts += self.piece(len(kv), values)
        return values[self.split.result], experts


class PiecewiseStep(StepInPieces):
    def __init__(
        self, platform: Platform, pool: Any, decoder: CompiledDecoder, kv: Sequence[KV], buffers: Buffers, size: int
    ) -> None:
        self.decoder = decoder
        self.values: Values = {}
        super().__init__(platform, pool, decoder.model, kv, buffers, size)

    def piece(self, layer_id: int) -> None:
        decoder, step = self.decoder, self.padded
        if layer_id == 0:
            self.values = decoder.begin(step.token_T, step.position_T, self.buffers.num_tokens)
            self.experts = []
        else:
            self.values[decoder.split.attentions[layer_id - 1].attended] = self.attended(layer_id - 1)
        self.experts += decoder.piece(layer_id, self.values)
        if layer_id == len(self.kv):
            self.x_TD = self.values[decoder.split.result]
            return
        self.store(layer_id, *decoder.heads(layer_id, self.values))
        decoder.forget(layer_id, self.values)
