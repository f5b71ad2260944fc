"""The decoder that all families share: embed, layers, norm, head. What differs is in ModelConfig or in a family's file.

T token rows, D hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.attention import KV, Attention
from anabranch.layers.linear import Linear
from anabranch.layers.mlp import MLP
from anabranch.layers.norm import Carried, RMSNorm
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

    def before(self, x: Carried, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD, residual_TD = self.input_layernorm.add(x, residual_TD)
        return self.self_attn.project(x_TD), residual_TD

    def after(
        self, attended_THD: torch.Tensor, residual_TD: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Carried, torch.Tensor | None]:
        x_TD = self.self_attn.output(attended_THD)
        x_TD, residual_TD = self.post_attention_layernorm.add(x_TD, residual_TD)
        y_TD = self.mlp.hand_on(x_TD, num_tokens) if isinstance(self.mlp, MoELayer) else self.mlp(x_TD)
        return y_TD, residual_TD


class Layer(Protocol):
    """What the decoder asks of a layer."""

    self_attn: Attention

    def before(self, x: Carried, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to attention: (heads of queries, keys and values; residual)."""

    def after(
        self, attended_THD: torch.Tensor, residual_TD: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Carried, torch.Tensor | None]:
        """From attention on: (x, residual) for the next layer. Rows from `num_tokens` on are padding."""


class Decoder(nn.Module):
    """Parameters are named as Hugging Face names them, but for what is packed; see `layers/packing`."""

    layer_class: type[nn.Module] = DecoderLayer
    layers: Sequence[Layer]
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
        group_of = {layer_id: g for g, group in enumerate(config.cache_groups) for layer_id in group.layers}
        ropes = list(dict.fromkeys(layer.attention.rope for layer in config.layers))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=_empty(config))
        self.layers = nn.ModuleList(  # type: ignore[assignment]
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
        x: Carried
        x, ropes = self.enter(step.token_T, step.position_T)
        residual_TD = None
        for layer_id, layer_kv in enumerate(kv):
            x, residual_TD = self.layer(layer_id, x, residual_TD, ropes, step, layer_kv)
        return self.leave(x, residual_TD)

    def layer(
        self, layer_id: int, x: Carried, residual_TD: torch.Tensor | None, ropes: list[Rope], step: Step, kv: KV
    ) -> tuple[Carried, torch.Tensor | None]:
        heads, residual_TD = self.before(layer_id, x, residual_TD)
        q_THD = self.store(layer_id, heads, ropes[self.rope_of_layer[layer_id]], step, kv)
        attended_THD = self.attend(layer_id, q_THD, step, kv)
        return self.after(layer_id, attended_THD, residual_TD, step.num_tokens)

    # The parts of `forward`, for those who run what is between attentions in one piece. Only `store` and `attend` know
    # more of a step than its tokens.

    def enter(self, token_T: torch.Tensor, position_T: torch.Tensor) -> tuple[torch.Tensor, list[Rope]]:
        x_TD = self.embed_tokens(token_T)
        if self.config.embedding_scale != 1.0:
            # As the families do it: the scale is rounded to the model's dtype first.
            x_TD = x_TD * torch.tensor(self.config.embedding_scale, dtype=x_TD.dtype)
        return x_TD, [rotary(position_T) for rotary in self.rotaries]

    def before(self, layer_id: int, x: Carried, residual_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers[layer_id].before(x, residual_TD)

    def store(self, layer_id: int, heads: torch.Tensor, rope: Rope, step: Step, kv: KV) -> torch.Tensor:
        return self.layers[layer_id].self_attn.store(heads, rope, step, kv)

    def attend(self, layer_id: int, q_THD: torch.Tensor, step: Step, kv: KV) -> torch.Tensor:
        return self.layers[layer_id].self_attn.attend(q_THD, step, kv)

    def after(
        self, layer_id: int, attended_THD: torch.Tensor, residual_TD: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Carried, torch.Tensor | None]:
        return self.layers[layer_id].after(attended_THD, residual_TD, num_tokens)

    def leave(self, x: Carried, residual_TD: torch.Tensor | None) -> torch.Tensor:
        return self.norm.add(x, residual_TD)[0]

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """logits_TV of hidden rows; pick the rows first, the vocabulary is large. They are in the model's dtype, which
        fp32 holds exactly: who reads them converts while reading. Where they are capped, they are fp32."""
        logits = ops.linear(x_TD, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x_TD)
        if self.config.logit_softcap:
            logits = torch.tanh(logits.float() / self.config.logit_softcap) * self.config.logit_softcap
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
