"""Gemma 4's decoder layer and router; see `gemma4`.

T token rows, D hidden width, E experts, K per token.
"""

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.attention import Attention
from anabranch.layers.linear import Linear
from anabranch.layers.mixer import Mixer
from anabranch.layers.mlp import MLP
from anabranch.layers.norm import RMSNorm
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.moe.config import MoEConfig
from anabranch.moe.layer import RoutedExperts
from anabranch.moe.setup import MoESetup, overlap


class Gemma4Router(nn.Module):
    """Normalise without a weight, scale each channel, project, choose; then a learned factor for each expert."""

    def __init__(self, config: MoEConfig, width: int, eps: float) -> None:
        super().__init__()
        self.proj = Linear(width, config.num_experts)
        self.scale = nn.Parameter(torch.empty(width))
        self.per_expert_scale = nn.Parameter(torch.empty(config.num_experts))
        self.top_k = config.top_k
        self.eps = eps

    def forward(self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        # Rounded after each factor, as the model was trained: routers decide by little.
        x_TD = ops.rms_norm(x_TD, None, self.eps) * self.scale * x_TD.shape[-1] ** -0.5
        logits_TE = ops.linear(x_TD, self.proj.weight, out_dtype=torch.float32)
        return ops.route(
            ops.RouteCall(logits_TE, self.top_k, expert_scale_E=self.per_expert_scale, num_tokens=num_tokens)
        )


class Gemma4Layer(nn.Module):
    def __init__(self, model: ModelConfig, layer: LayerConfig, cache_group: int, moe: MoESetup) -> None:
        super().__init__()
        width, eps = model.hidden_size, model.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(layer.attention, width, eps, cache_group, moe.group)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, layer.mlp_width, model.activation, group=moe.group)
        self.post_feedforward_layernorm = RMSNorm(width, eps)
        self.layer_scalar = nn.Parameter(torch.empty(1))
        self.moe: RoutedExperts | None = None
        if layer.moe is not None:
            router = Gemma4Router(layer.moe, width, eps)
            self.moe = RoutedExperts(router, layer.moe, width, model.activation, moe)
            self.pre_feedforward_layernorm_2 = RMSNorm(width, eps)
            self.post_feedforward_layernorm_1 = RMSNorm(width, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(width, eps)
        self.side_stream = moe.side_stream

    @property
    def mixer(self) -> Mixer:
        return self.self_attn

    def before(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The previous layer ended in a scale of the whole stream, so x is the residual."""
        return self.mixer.project(self.input_layernorm(x_TD)), x_TD

    def after(
        self, mixed: torch.Tensor, residual_TD: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x_TD = self.post_attention_layernorm.add_to(residual_TD, self.mixer.output(mixed))
        if self.moe is None:
            y_TD = self._dense(x_TD)
        else:
            routed_TD, dense_TD = overlap(
                self.side_stream,
                x_TD,
                main=lambda x: self._routed(x, num_tokens),
                side=lambda x: self.post_feedforward_layernorm_1(self._dense(x)),
            )
            y_TD = self.post_feedforward_layernorm_2.add_to(dense_TD, routed_TD)
        return self.post_feedforward_layernorm.add_to(x_TD, y_TD, self.layer_scalar), None

    def _dense(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.pre_feedforward_layernorm(x_TD))

    def _routed(self, x_TD: torch.Tensor, num_tokens: torch.Tensor | None) -> torch.Tensor:
        assert self.moe is not None
        return self.moe(self.pre_feedforward_layernorm_2(x_TD), num_tokens, router_input_TD=x_TD)
