"""mlx_lm's qwen2_moe and what it leaves out: renormalised weights of experts, and an embedding that is the head too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen2_moe


@dataclass
class Args(qwen2_moe.ModelArgs):
    norm_topk_prob: bool = False


class RenormalizingBlock(qwen2_moe.Qwen2MoeSparseMoeBlock):
    def __call__(self, x: mx.array) -> mx.array:
        logits = self.gate(x)
        chosen = mx.argpartition(-logits, kth=self.top_k - 1, axis=-1)[..., : self.top_k]
        # A softmax of the chosen alone is the softmax of all, renormalised.
        weights = mx.softmax(mx.take_along_axis(logits, chosen, axis=-1), axis=-1, precise=True)
        routed = (self.switch_mlp(x, chosen) * weights[..., None]).sum(axis=-2)
        return routed + mx.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class Model(qwen2_moe.Model):
    def __init__(self, args: Args) -> None:
        super().__init__(args)
        if args.norm_topk_prob:
            for layer in self.layers:
                layer.mlp = RenormalizingBlock(args)
        if args.tie_word_embeddings:
            self.pop("lm_head")

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        if not self.args.tie_word_embeddings:
            return super().__call__(inputs, cache)
        return self.model.embed_tokens.as_linear(self.model(inputs, cache))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        if self.args.tie_word_embeddings:
            weights = {name: weight for name, weight in weights.items() if not name.startswith("lm_head.")}
        return super().sanitize(weights)
