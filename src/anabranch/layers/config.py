"""What the mixer of a layer is: its sizes, what it keeps between steps, which weights it has. Without torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

from anabranch.formats import Shape
from anabranch.layers.cache import CacheSpec, KeepAll, KeepWindow, OneState

EXPANDED_ROWS = 16_384
"""Tokens of which latent attention has keys and values of all heads in memory; of more, it has those of fewer heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions. Angles = position × frequency; `rotary_dim` of `head_dim` dimensions turn."""

    kind: Literal["default", "linear", "llama3", "proportional", "yarn", "longrope"] = "default"
    theta: float = 10_000.0
    head_dim: int
    rotary_dim: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    """Of yarn: pairs that turn more often than the first in the original length are kept, less often than the second
    divided by the factor."""
    truncate: bool = True
    """Of yarn: the range between the two is rounded to whole pairs."""
    factors: tuple[float, ...] = ()
    """Of longrope: what divides the frequency of each pair."""
    attention_factor: float = 1.0
    """Of yarn and longrope: cosines and sines are multiplied by it."""


class MixerConfig(Protocol):
    """What the decoder and the memory plan ask of the config of a layer's mixer. It is hashable."""

    name: ClassVar[str]
    """What checkpoints call the mixer in a layer."""
    module: ClassVar[str]
    """`module:class` of the layers.mixer.Mixer, made with (config, hidden width, norm eps, cache group, group of
    ranks)."""

    @property
    def rope(self) -> RopeConfig | None:
        """None: it does not use rotary positions."""

    @property
    def cache(self) -> CacheSpec:
        """What it keeps between steps."""

    @property
    def values_per_row(self) -> int:
        """Numbers that a token row takes in a step; for the memory plan."""

    def weight_shapes(self, width: int) -> Iterator[Shape]:
        """Of all its weights."""

    def divide(self, rank: int, num_ranks: int) -> MixerConfig:
        """What one of several ranks has of it; ValueError, with the cause, if it cannot be divided among so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    name: ClassVar[str] = "self_attn"
    module: ClassVar[str] = "anabranch.layers.attention:Attention"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeConfig
    window: int = 0
    """Tokens a query sees, itself included; 0: all."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys: per head, or over all heads at once."""
    v_norm: bool = False
    value_is_key: bool = False
    """No value projection: the raw key projection serves as value."""
    gated: bool = False
    """The result is × sigmoid(gate); in checkpoints each query head is followed by its gate in `q_proj`."""
    neighbours: bool = False
    """Dimensions that turn together are next to each other in checkpoints, not half a head apart."""
    clip: float = 0.0
    """Queries, keys and values are clamped to ±clip; 0: not."""
    sinks: bool = False
    """Each head has a learned score that takes a part of its weights; see ops/attention."""
    cache_dtype: str | None = None
    """What keys and values are kept in; None: the model's dtype."""
    rank: int = 0
    num_ranks: int = 1
    """Heads are those of one rank of so many."""
    kv_shares: int = 1
    """Different shares of the key-value heads: where there are fewer than ranks, several ranks have the same."""

    @property
    def cache(self) -> CacheSpec:
        heads = self.num_kv_heads, self.head_dim
        return CacheSpec((heads, heads), KeepWindow(self.window) if self.window else KeepAll(), self.cache_dtype)

    @property
    def values_per_row(self) -> int:
        return 2 * ((2 if self.gated else 1) * self.num_heads + self.num_kv_heads) * self.head_dim

    def weight_shapes(self, width: int) -> Iterator[Shape]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = (2 if self.gated else 1) * q + (1 if self.value_is_key else 2) * kv
        yield qkv, width
        yield width, q
        # The norm over all heads is that of all ranks together.
        every = q * self.num_ranks + kv * self.kv_shares
        norms = {"none": 0, "head": 2 * self.head_dim, "all": every}[self.qk_norm]
        biases = (qkv if self.qkv_bias else 0) + (width if self.output_bias else 0)
        yield (norms + biases + (self.num_heads if self.sinks else 0),)

    def divide(self, rank: int, num_ranks: int) -> AttentionConfig:
        if self.num_heads % num_ranks:
            raise ValueError(f"{self.num_heads} attention heads cannot be divided among {num_ranks} ranks")
        shares = min(self.num_kv_heads, num_ranks)
        if self.num_kv_heads % shares or num_ranks % shares:
            raise ValueError(f"{self.num_kv_heads} key-value heads cannot be divided among {num_ranks} ranks")
        heads, kv_heads = self.num_heads // num_ranks, self.num_kv_heads // shares
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, rank=rank, num_ranks=num_ranks, kv_shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Attention that keeps a latent row of each token, from which the keys and values of all heads are made; see
    ops/latent_attention."""

    name: ClassVar[str] = "self_attn"
    module: ClassVar[str] = "anabranch.layers.latent:LatentAttention"
    num_heads: int
    latent_dim: int
    plain_dim: int
    """Dimensions of queries and keys without positions; those that turn come after them."""
    value_dim: int
    """Of a head."""
    scale: float
    rope: RopeConfig
    """Of the dimensions that turn; all heads share one such key."""
    interleaved: bool = True
    """Pairs that turn are neighbours, not halves."""
    query_rank: int = 0
    """Queries are made of a normed row that is this wide; 0: of the hidden row."""
    bias: bool = False
    """Of all projections but those to heads."""
    rank: int = 0
    num_ranks: int = 1
    """Heads are those of one rank of so many; each keeps all latent rows."""

    @property
    def key_dim(self) -> int:
        return self.plain_dim + self.rope.rotary_dim

    @property
    def row(self) -> int:
        """What is kept of a token: the latent row and the key that turns."""
        return self.latent_dim + self.rope.rotary_dim

    @property
    def cache(self) -> CacheSpec:
        return CacheSpec(((self.row,),), KeepAll())

    @property
    def values_per_row(self) -> int:
        per_head = 2 * self.key_dim + 2 * self.latent_dim + self.value_dim
        return self.num_heads * per_head + 2 * (self.query_rank + self.row)

    @property
    def most_absorbed(self) -> int:
        """The most new tokens of a request whose queries are taken to the latent space. With more, the rows of its
        tokens are expanded to keys and values instead. A head with L latent dims, F that turn, N plain ones and V of
        values, q new tokens of n and p pairs of a query and a key multiplies and adds

            p · (2L + F)     + q · L · (N + V)   in the latent space,
            p · (N + F + V)  + n · L · (N + V)   with keys and values:

        less if p · (2L - N - V) > (n - q) · L · (N + V). As p > q · (n - q), that is so whatever n is from
        q = L · (N + V) / (2L - N - V) on: 171 for DeepSeek's. Below, it is so with almost no context only, where it
        saves less than the kernels cost that such a request has to itself."""
        saved = 2 * self.latent_dim - self.plain_dim - self.value_dim
        return self.latent_dim * (self.plain_dim + self.value_dim) // saved if saved > 0 else sys.maxsize

    @property
    def scratch(self) -> int:
        """Numbers that a step takes besides, however many rows it has; for the memory plan."""
        expanded = self.num_heads * (self.key_dim + self.value_dim)
        return EXPANDED_ROWS * (expanded + self.row) + expanded * self.row

    def weight_shapes(self, width: int) -> Iterator[Shape]:
        q = self.num_heads * self.key_dim
        yield (self.query_rank or q) + self.row, width
        if self.query_rank:
            yield q, self.query_rank
        yield width, self.num_heads * self.value_dim
        # The expansion to heads is plain in memory, whatever the checkpoint has.
        yield (self.num_heads * (self.plain_dim + self.value_dim) * self.latent_dim,)
        yield (self.query_rank + self.latent_dim + (self.query_rank + self.row + width if self.bias else 0),)

    def divide(self, rank: int, num_ranks: int) -> LatentConfig:
        if self.num_heads % num_ranks:
            raise ValueError(f"{self.num_heads} attention heads cannot be divided among {num_ranks} ranks")
        return replace(self, num_heads=self.num_heads // num_ranks, rank=rank, num_ranks=num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaConfig:
    """The gated delta net; see ops/gated_delta."""

    name: ClassVar[str] = "linear_attn"
    module: ClassVar[str] = "anabranch.layers.gated_delta:GatedDelta"
    num_key_heads: int
    num_heads: int
    """Of values; each key head serves num_heads / num_key_heads of them."""
    key_dim: int
    value_dim: int
    """Of a head."""
    conv_width: int
    interleaved: bool = False
    """Checkpoints keep the projections in two tensors, key head by key head."""
    state_dtype: str | None = "float32"
    """None: that of the activations."""
    rank: int = 0
    num_ranks: int = 1
    """Heads are those of one rank of so many."""
    rope: ClassVar[None] = None
    verifies_drafts: ClassVar[bool] = True
    """The mixer has `draft_states`."""
    keeps_cuts: ClassVar[bool] = True
    """The mixer heeds `Step.cuts`."""

    @property
    def channels(self) -> int:
        """What the convolution reads: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def row(self) -> int:
        """Outputs of the projection: channels, z, b, a."""
        return self.channels + self.num_heads * (self.value_dim + 2)

    @property
    def cache(self) -> CacheSpec:
        conv, state = (self.conv_width - 1, self.channels), (self.num_heads, self.key_dim, self.value_dim)
        return CacheSpec((conv, state), OneState(), self.state_dtype)

    @property
    def values_per_row(self) -> int:
        return self.row + self.channels + self.num_heads * self.value_dim

    def weight_shapes(self, width: int) -> Iterator[Shape]:
        yield self.row, width
        yield width, self.num_heads * self.value_dim
        yield (self.channels * self.conv_width + 2 * self.num_heads + self.value_dim,)

    def divide(self, rank: int, num_ranks: int) -> GatedDeltaConfig:
        if self.num_key_heads % num_ranks:
            raise ValueError(f"{self.num_key_heads} key heads of a delta net cannot be divided among {num_ranks} ranks")
        heads, key_heads = self.num_heads // num_ranks, self.num_key_heads // num_ranks
        return replace(self, num_heads=heads, num_key_heads=key_heads, rank=rank, num_ranks=num_ranks)
