"""Rotary position tables: positions → cos and sin, once per step and kind of rope, shared by all layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from anabranch.layers.config import RopeConfig


class Rotary(nn.Module):
    def __init__(self, config: RopeConfig | None) -> None:
        """None: for mixers without rotary positions."""
        super().__init__()
        self.config = config
        # Made when first used, on the device of the positions: models are built without memory.
        self.frequency_F: torch.Tensor | None = None

    def forward(self, position_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(cos_TF, sin_TF) in fp32; nothing without a config."""
        if self.config is None:
            return ()
        if self.frequency_F is None:
            self.frequency_F = frequencies(self.config).to(position_T.device)
        angle_TF = position_T.float()[:, None] * self.frequency_F
        cos_TF, sin_TF = angle_TF.cos(), angle_TF.sin()
        if self.config.attention_factor != 1.0:
            return cos_TF * self.config.attention_factor, sin_TF * self.config.attention_factor
        return cos_TF, sin_TF


def frequencies(rope: RopeConfig) -> torch.Tensor:
    """Radians per position of each rotated pair, fp32."""
    if rope.kind == "proportional":
        # The exponent runs over the whole head; only the first pairs turn, the others stand still.
        turning = rope.rotary_dim // 2
        exponent = torch.arange(0, 2 * turning, 2, dtype=torch.float32) / rope.head_dim
        still = torch.zeros(rope.head_dim // 2 - turning)
        return torch.cat([1.0 / rope.theta**exponent, still]) / rope.factor
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    frequency = 1.0 / rope.theta**exponent
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        # Long waves are stretched by the factor, short ones kept, those between blended.
        turns = rope.original_max_position * frequency / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequency / rope.factor + blend * frequency
    if rope.kind == "longrope":
        return frequency / torch.tensor(rope.factors)
    if rope.kind == "yarn":
        first, last = _yarn_range(rope)
        blend = ((torch.arange(len(frequency)) - first) / (last - first)).clamp(0, 1)
        return blend * frequency / rope.factor + (1 - blend) * frequency
    return frequency


def _yarn_range(rope: RopeConfig) -> tuple[float, float]:
    """Pairs up to the first number are kept, from the second on divided by the factor."""

    def pair(turns: float) -> float:
        """The one that turns so often in the original length."""
        wave = rope.original_max_position / (2 * math.pi * turns)
        return rope.rotary_dim * math.log(wave) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    return first, last + 0.001 if first == last else last
