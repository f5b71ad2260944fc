"""The decoder that all families share: embed, layers, norm, head. What differs is in ModelConfig or in a family's file.

T token rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from anabranch.layers.attention import KV, Attention
from anabranch.layers.linear import Linear
from anabranch.layers.mlp import MLP
from anabranch.layers.norm import RMSNorm
from anabranch.layers.rotary import Rotary
from anabranch.layers.step import Step
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.moe.layer import MoELayer
from anabranch.platforms import Platform, SideStream

Rope = tuple[torch.Tensor, torch.Tensor]


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward (dense or experts), with the residual carried beside."""

    def __init__(self, model: ModelConfig, layer: LayerConfig, kv_group: int, side_stream: SideStream) -> None:
        super().__init__()
        width, eps = model.hidden_size, model.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(layer.attention, width, eps, kv_group)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp: nn.Module
        if layer.moe is not None:
            self.mlp = MoELayer(layer.moe, width, model.activation, side_stream)
        else:
            self.mlp = MLP(width, layer.mlp_width, model.activation, model.mlp_bias)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, rope: Rope, step: Step, kv: KV
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD, residual_TD = self.input_layernorm.add(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, rope, step, kv)
        x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
        x_TD = self.mlp(x_TD, step.num_tokens) if isinstance(self.mlp, MoELayer) else self.mlp(x_TD)
        return x_TD, residual_TD


class Decoder(nn.Module):
    """Parameters are named as Hugging Face names them, but for what is packed; see `layers/packing`."""

    layer_class: type[nn.Module] = DecoderLayer
    prefixes: tuple[str, ...] = ("model.",)
    """What a checkpoint may put before the names of this module."""
    renames: tuple[tuple[str, str], ...] = ((".mlp.router.", ".mlp.gate."),)
    """(ours, theirs): parts of names, replaced in order, where a checkpoint does not call them as we do."""
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    """Parts of the names of checkpoint tensors that are not needed here."""

    def __init__(self, config: ModelConfig, platform: Platform) -> None:
        super().__init__()
        self.config = config
        side_stream = platform.make_side_stream()
        group_of = {layer_id: g for g, group in enumerate(config.kv_groups) for layer_id in group.layers}
        ropes = list(dict.fromkeys(layer.attention.rope for layer in config.layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=_empty(config))
        self.layers = nn.ModuleList(
            self.layer_class(config, layer, group_of[layer_id], side_stream)
            for layer_id, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(config.hidden_size, config.vocab_size)
        self.rotaries = nn.ModuleList(Rotary(rope) for rope in ropes)
        self.rope_of_layer = [ropes.index(layer.attention.rope) for layer in config.layers]
        self.requires_grad_(False)

    def forward(self, step: Step, kv: Sequence[KV]) -> torch.Tensor:
        """Hidden rows x_TD after the last norm. Keys and values of the step's tokens are left in `kv`, one a layer."""
        x_TD = self.embed_tokens(step.token_T)
        if self.config.embedding_scale != 1.0:
            # As the families do it: the scale is rounded to the model's dtype first.
            x_TD = x_TD * torch.tensor(self.config.embedding_scale, dtype=x_TD.dtype)
        ropes = [rotary(step.position_T) for rotary in self.rotaries]
        residual_TD = None
        for layer, layer_kv, rope_id in zip(self.layers, kv, self.rope_of_layer, strict=True):
            x_TD, residual_TD = layer(x_TD, residual_TD, ropes[rope_id], step, layer_kv)
        return self.norm.add(x_TD, residual_TD)[0]

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """fp32 logits_TV of hidden rows; pick the rows first, the vocabulary is large."""
        logits = F.linear(x_TD, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x_TD)
        logits = logits.float()
        if self.config.logit_softcap:
            logits = torch.tanh(logits / self.config.logit_softcap) * self.config.logit_softcap
        return logits

    @classmethod
    def checkpoint_names(cls, name: str) -> list[str]:
        """The names a checkpoint may use for one of ours."""
        for ours, theirs in cls.renames:
            name = name.replace(ours, theirs)
        return [name] if name.startswith("lm_head.") else [prefix + name for prefix in cls.prefixes]


def _empty(config: ModelConfig) -> torch.Tensor:
    """An embedding without torch's own random initialisation, which takes seconds for a large vocabulary."""
    return torch.empty(config.vocab_size, config.hidden_size)
