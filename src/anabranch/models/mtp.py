"""A draft layer: multi-token prediction (MTP), a decoder layer that a checkpoint has besides the model's own. Of a
token and what the model made of the one before, it guesses the next; the embedding and the head are the model's.

    x = fc([norm(embedding of token t + 1), norm(hidden row of token t)]) → a layer with attention → norm → head → t + 2

Its keys and values are one more layer's in the pages of the model, at the position of token t.

T token rows, D hidden width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anabranch.layers.linear import Linear
from anabranch.layers.mixer import Cache, Rope
from anabranch.layers.norm import RMSNorm
from anabranch.layers.step import Step

if TYPE_CHECKING:
    from anabranch.models.config import ModelConfig


class DraftLayer(nn.Module):
    """Parameters are named as in checkpoints, below `mtp.`"""

    def __init__(self, config: ModelConfig, layer: nn.Module) -> None:
        """`layer` is one of models/decoder."""
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = RMSNorm(width, eps), RMSNorm(width, eps)
        self.fc = Linear(2 * width, width)
        self.layers = nn.ModuleList([layer])
        self.norm = RMSNorm(width, eps)

    def forward(
        self, embedding_TD: torch.Tensor, hidden_TD: torch.Tensor, rope: Rope, step: Step, cache: Cache
    ) -> torch.Tensor:
        """Hidden rows x_TD for the head. Rows as in the step, but for the tokens."""
        layer: Any = self.layers[0]
        parts = self.pre_fc_norm_embedding(embedding_TD), self.pre_fc_norm_hidden(hidden_TD)
        projected, residual_TD = layer.before(self.fc(torch.cat(parts, 1)), None)
        mixed = layer.mixer.mix(layer.mixer.write(projected, rope, step, cache), step, cache)
        x, last_TD = layer.after(mixed, residual_TD, step.num_tokens)
        return self.norm.add(x, last_TD)[0]
