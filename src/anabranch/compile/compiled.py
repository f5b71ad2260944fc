"""The layer loop made by a compiler: the decoder is traced once, split at its mixers, and each piece is compiled for
any number of tokens; then captured per padded size, or called as it is for sizes that are not captured.

The shared expert of a compiled piece runs after the routed ones: compiled code runs on one stream.
"""

import logging
from typing import Any

import torch

from anabranch.compile.compiler import PieceCompiler
from anabranch.compile.split import split
from anabranch.compile.trace import trace
from anabranch.models.decoder import Cut, Decoder, Parts

log = logging.getLogger(__name__)

Values = dict[str, Any]
"""Tensors (and numbers of rows) by their names in the traced graph."""


class CompiledDecoder:
    """A model's pieces, for any number of tokens but one."""

    def __init__(self, model: Decoder, compiler: PieceCompiler) -> None:
        self.traced = trace(model, look_into=compiler.compiler != "none")
        self.split = split(self.traced)
        self.functions = [compiler.function(piece) for piece in self.split.pieces]
        log.info(
            "%d pieces, %d of them different: %d compiled, %d loaded",
            *(len(self.functions), len(compiler.functions), compiler.num_compiled, compiler.num_loaded),
        )
        self.no_padding = torch.full((), 2**31 - 1, dtype=torch.int32, device=model.embed_tokens.weight.device)

    def start(
        self, token_T: torch.Tensor, position_T: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Parts, list[torch.Tensor]]:
        """The layer loop, and the list to which it adds expert_TK of every MoE layer."""
        traced, experts = self.traced, list[torch.Tensor]()
        values: Values = {traced.token: token_T, traced.position: position_T}
        if traced.num_tokens is not None:
            values[traced.num_tokens] = self.no_padding if num_tokens is None else num_tokens
        values = {**self.split.constants, **values, **dict.fromkeys(traced.sizes, token_T.shape[0])}
        return self._parts(values, experts), experts

    def _parts(self, values: Values, experts: list[torch.Tensor]) -> Parts:
        for place, (piece, function) in enumerate(zip(self.split.pieces, self.functions, strict=True)):
            values.update(zip(piece.outputs, function(*(values[name] for name in piece.inputs)), strict=True))
            experts += [values[name] for name in piece.experts]
            if place < len(self.split.mixings):
                values[self.split.mixings[place].mixed] = yield self._cut(place, values)
        return values[self.split.result]

    def _cut(self, place: int, values: Values) -> Cut:
        """What the piece left for its mixer; values that are not read again are dropped."""
        mixing = self.split.mixings[place]
        projected, rope = (tuple(values[name] for name in names) for names in (mixing.projected, mixing.rope))
        for name in self.split.finished[place]:
            values.pop(name, None)
        return Cut(place, projected, rope)
