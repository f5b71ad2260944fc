"""Records which experts tokens went to, in MLX's models. The ids of a token are in no particular order.

L MoE layers, N token rows, K experts per token, E experts.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU


class WatchedGLU(SwitchGLU):
    """Replaces the class of a model's experts: only they are given the ids."""

    watch: ExpertWatch

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if self.watch.wanted:
            self.watch.seen.append(indices.reshape(-1, indices.shape[-1]))
        return super().__call__(x, indices)


class ExpertWatch:
    def __init__(self, model: Any) -> None:
        self.wanted = False
        self.seen: list[mx.array] = []
        layers = [module for layer in model.layers for module in layer.modules() if isinstance(module, SwitchGLU)]
        for layer in layers:
            layer.__class__ = WatchedGLU
            layer.watch = self
        num_experts = max((layer.gate_proj.weight.shape[0] for layer in layers), default=0)
        self.count_LE = np.zeros((len(layers), num_experts), np.int64)

    def take(self) -> mx.array | None:
        """expert_NLK of the rows that were computed since the last call, if wanted."""
        seen, self.seen = self.seen, []
        return mx.stack(seen, axis=1) if seen else None

    def count(self, expert_NLK: np.ndarray) -> None:
        for layer_id in range(expert_NLK.shape[1]):
            self.count_LE[layer_id] += np.bincount(expert_NLK[:, layer_id].ravel(), minlength=self.count_LE.shape[1])
