"""The decoder that all families share: embed, layers, norm, head. What differs is in ModelConfig and Family.

T token rows, D hidden width, V vocabulary.
"""

from collections.abc import Callable, Generator, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Embedding, Linear, vocabulary_shard
from anabranch.layers.mixer import Cache, Mixer, Rope
from anabranch.layers.mlp import MLP
from anabranch.layers.norm import Hidden, RMSNorm
from anabranch.layers.rotary import Rotary
from anabranch.layers.step import Step
from anabranch.models.config import LayerConfig, ModelConfig
from anabranch.models.family import Family
from anabranch.models.mtp import DraftLayer
from anabranch.moe.layer import MoELayer
from anabranch.moe.setup import MoESetup
from anabranch.ops.weight import Weight


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward (dense or experts), with the residual carried separately."""

    def __init__(self, model: ModelConfig, layer: LayerConfig, cache_group: int, moe: MoESetup) -> None:
        super().__init__()
        width, eps = model.hidden_size, model.norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.mixer_name = layer.mixer.name
        mixer_class = resolve_name(layer.mixer.module)
        self.add_module(self.mixer_name, mixer_class(layer.mixer, width, eps, cache_group, moe.group))
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp: nn.Module
        if layer.moe is not None:
            self.mlp = MoELayer(layer.moe, width, model.activation, moe)
        else:
            self.mlp = MLP(width, layer.mlp_width, model.activation, model.mlp_bias, moe.group)

    def set_fp8_norms(self) -> None:
        """After loading: norms whose rows are multiplied in FP8 may attach them in that form."""
        readers = (self.input_layernorm, self.mixer_name), (self.post_attention_layernorm, "mlp")
        for norm, name in readers:
            formats = [module.format for module in self.get_submodule(name).modules() if isinstance(module, Weight)]
            packed = any(format.kind in ("int4", "fp4") for format in formats)
            norm.fp8 = "groups" if any(format.is_block_fp8 for format in formats) else "parts" if packed else ""

    @property
    def mixer(self) -> Mixer:
        return self._modules[self.mixer_name]  # type: ignore[return-value]

    def before(self, x: Hidden, residual_TD: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        x_TD, residual_TD = self.input_layernorm.add(x, residual_TD)
        return self.mixer.project(x_TD), residual_TD

    def after(
        self, mixed: torch.Tensor, residual_TD: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Hidden, torch.Tensor | None]:
        x_TD, residual_TD = self.post_attention_layernorm.add(self.mixer.output(mixed), residual_TD)
        y_TD = self.mlp.forward_to_norm(x_TD, num_tokens) if isinstance(self.mlp, MoELayer) else self.mlp(x_TD)
        return y_TD, residual_TD


class Layer(Protocol):
    """What the layer loop asks of a layer."""

    @property
    def mixer(self) -> Mixer: ...

    def before(self, x: Hidden, residual_TD: torch.Tensor | None) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Up to the mixer: (what its `project` returns, residual)."""

    def after(
        self, mixed: torch.Tensor, residual_TD: torch.Tensor, num_tokens: torch.Tensor | None
    ) -> tuple[Hidden, torch.Tensor | None]:
        """From the mixer on: (x, residual) for the next layer. Rows from `num_tokens` on are padding."""


class Cut(NamedTuple):
    """A point at which the layer loop waits for a mixer."""

    layer_id: int
    projected: tuple[torch.Tensor, ...]
    rope: Rope


Parts = Generator[Cut, torch.Tensor, torch.Tensor]
"""The layer loop: yields a Cut for every layer, is sent what that layer's mixer returns, returns hidden rows x_TD."""


def run_parts(parts: Parts, mix: Callable[[Cut], torch.Tensor]) -> torch.Tensor:
    """The layer loop in one go."""
    try:
        cut = next(parts)
        while True:
            mixed = mix(cut)
            del cut  # its tensors are not needed any more
            cut = parts.send(mixed)
            del mixed
    except StopIteration as end:
        return end.value


class Decoder(nn.Module):
    """Parameters are named as Hugging Face names them, but for what is packed; see `ops/weight`."""

    layers: Sequence[Layer]

    def __init__(self, config: ModelConfig, family: Family, moe: MoESetup) -> None:
        super().__init__()
        self.config = config
        self.family = family
        layer_class = resolve_name(family.layer)
        group_of = {layer_id: g for g, group in enumerate(config.cache_groups) for layer_id in group.layers}
        ropes = list(dict.fromkeys(layer.mixer.rope for layer in config.layers))
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, moe.group)
        self.layers = nn.ModuleList(  # type: ignore[assignment]
            layer_class(config, layer, group_of[layer_id], moe) for layer_id, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None
        if not config.tie_embeddings:
            head = vocabulary_shard(config.vocab_size, moe.group)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, shard=head)
        self.group = moe.group
        self.rotaries = nn.ModuleList(map(Rotary, ropes))
        self.rope_of_layer = [ropes.index(layer.mixer.rope) for layer in config.all_layers]
        self.mtp: DraftLayer | None = None
        if config.draft_layer is not None:
            layer = layer_class(config, config.draft_layer, group_of[len(config.layers)], moe)
            self.mtp = DraftLayer(config, layer)
        for module in self.modules():
            if family.norms_from_one and isinstance(module, RMSNorm):
                module.start_from_one()
        self.requires_grad_(False)

    def forward(self, step: Step, caches: Sequence[Cache]) -> torch.Tensor:
        """Hidden rows x_TD after the last norm. The mixers leave what later steps need in `caches`, one a layer; with
        fewer caches than layers only the first layers run."""
        return self.run(self.parts(step.token_T, step.position_T, step.num_tokens, len(caches)), step, caches)

    def run(self, parts: Parts, step: Step, caches: Sequence[Cache]) -> torch.Tensor:
        """A layer loop, this model's or a compiled one, with this model's mixers."""
        return run_parts(parts, lambda cut: self.mix(cut, self.write(cut, step, caches), step, caches))

    def parts(
        self,
        token_T: torch.Tensor,
        position_T: torch.Tensor,
        num_tokens: torch.Tensor | None,
        num_layers: int | None = None,
    ) -> Parts:
        """The layer loop of a step. It knows no more of it than its tokens; rows from `num_tokens` on are padding."""
        return self.loop(*self.inputs(token_T, position_T), num_tokens, num_layers)

    def inputs(self, token_T: torch.Tensor, position_T: torch.Tensor) -> tuple[torch.Tensor, list[Rope]]:
        """What the layer loop begins with: embeddings, and tables for each kind of rope."""
        return self._embed(token_T), [rotary(position_T) for rotary in self.rotaries]

    def loop(self, x: Any, ropes: list[Rope], num_tokens: torch.Tensor | None, num_layers: int | None = None) -> Parts:
        """The only layer loop."""
        residual_TD = None
        layer_id, num_layers = 0, len(self.layers) if num_layers is None else num_layers
        while layer_id < num_layers:  # torch 2.11 cannot trace a `for` loop with `yield` in it
            layer = self.layers[layer_id]
            # x is whatever goes from one part to the next: a second name would keep tensors in memory for too long.
            x, residual_TD = layer.before(x, residual_TD)
            x = yield Cut(layer_id, x, ropes[self.rope_of_layer[layer_id]])
            x, residual_TD = layer.after(x, residual_TD, num_tokens)
            layer_id += 1
        return self.norm.add(x, residual_TD)[0]

    def draft(self, token_T: torch.Tensor, hidden_TD: torch.Tensor, step: Step, cache: Cache) -> torch.Tensor:
        """Hidden rows of the draft layer, whose logits are for the tokens after `token_T`. These follow the tokens of
        the step, of which `hidden_TD` are the hidden rows; `cache` is the draft layer's."""
        assert self.mtp is not None
        rope = self.rotaries[self.rope_of_layer[-1]](step.position_T)
        return self.mtp(self._embed(token_T), hidden_TD, rope, step, cache)

    def _embed(self, token_T: torch.Tensor) -> torch.Tensor:
        x_TD: torch.Tensor = self.embed_tokens(token_T)
        if self.config.embedding_scale != 1.0:
            # As the families do it: the scale is rounded to the model's dtype first.
            x_TD = x_TD * torch.tensor(self.config.embedding_scale, dtype=x_TD.dtype)
        return x_TD

    def write(self, cut: Cut, step: Step, caches: Sequence[Cache]) -> torch.Tensor:
        return self.layers[cut.layer_id].mixer.write(cut.projected, cut.rope, step, caches[cut.layer_id])

    def mix(self, cut: Cut, written: torch.Tensor, step: Step, caches: Sequence[Cache]) -> torch.Tensor:
        return self.layers[cut.layer_id].mixer.mix(written, step, caches[cut.layer_id])

    def logits(self, x_TD: torch.Tensor) -> torch.Tensor:
        """logits_TV of hidden rows; pick the rows first, the vocabulary is large. They are in the model's dtype, which
        fp32 holds exactly: readers convert them while reading. Where they are capped, they are fp32."""
        logits = ops.linear(x_TD, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x_TD)
        if logits.shape[1] != self.config.vocab_size:
            logits = self.group.all_gather(logits, dim=1)
        if self.config.logit_softcap:
            logits = ops.cap_logits(logits, self.config.logit_softcap)
        return logits
