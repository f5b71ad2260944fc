"""The gated delta net as a mixer: a state for each request in the place of keys and values. See ops/gated_delta.

T tokens, W hidden width; other sizes as in the op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anabranch import ops
from anabranch.layers.linear import Linear, PackedLinear, Rows, WeightAlone
from anabranch.layers.mixer import Cache, Rope
from anabranch.layers.step import Step
from anabranch.ops.weight import Shard, Weight
from anabranch.parallel.group import ALONE, Group

if TYPE_CHECKING:
    from anabranch.layers.config import GatedDeltaConfig


class GatedDelta(nn.Module):
    """A Mixer whose cache is (conv_PLC, state_PHKV), a page for each request; where drafts are verified, also kept_NX
    of `DraftStates`."""

    def __init__(
        self, config: GatedDeltaConfig, width: int, eps: float, cache_group: int, group: Group = ALONE
    ) -> None:
        super().__init__()
        self.config = config
        self.eps = eps
        self.cache_group = cache_group
        self.written_shape = (config.row,)
        self.mixed_shape = config.num_heads, config.value_dim
        self.group = group
        rank, ranks = config.rank, config.num_ranks
        heads = config.num_heads * ranks
        keys, values = config.num_key_heads * ranks * config.key_dim, heads * config.value_dim
        channels = (keys, ranks), (keys, ranks), (values, ranks)
        parts = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        rows = interleaved_rows(config) if config.interleaved else parts
        sections = *channels, (values, ranks), (heads, ranks), (heads, ranks)
        self.in_proj = PackedLinear(width, rows, shard=Shard(0, rank, ranks, sections))
        self.conv1d = WeightAlone((2 * keys + values, 1, config.conv_width), Shard(0, rank, ranks, channels))
        self.norm = nn.RMSNorm(config.value_dim)  # for its parameter's name; the op computes it
        self.A_log, self.dt_bias = (
            Weight((heads,), shard=Shard(0, rank, ranks), dtype=torch.float32) for _ in range(2)
        )
        self.out_proj = Linear(values, width, shard=Shard(1, rank, ranks))

    def project(self, x_TW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.in_proj(x_TW),)

    def write(self, projected: tuple[torch.Tensor, ...], rope: Rope, step: Step, cache: Cache) -> torch.Tensor:
        return projected[0]  # the state depends on the request: `mix` updates it

    def mix(self, written: torch.Tensor, step: Step, cache: Cache) -> torch.Tensor:
        page_R = step.page_tables[self.cache_group][:, 0]  # logical page 0 of each request is its state
        parameters: tuple[Any, ...] = *self.weights, self.norm.weight, self.eps, self.config.num_key_heads
        drafts, context_len_R, y_THV = step.drafts, step.context_len_R, None
        if drafts is not None:
            states = cache[2], cache[0], cache[1]
            y_THV = ops.gated_delta_drafts(ops.DeltaDraftsCall(written, *states, page_R, *drafts[:3], *parameters))
            if drafts.other_len_R is None:
                return y_THV
            context_len_R = drafts.other_len_R
        rest: tuple[Any, ...] = page_R, step.query_start_R, context_len_R, *parameters, step.max_query
        if step.cuts is not None:
            rest = *rest, *step.cuts[self.cache_group]
        others_THV = ops.gated_delta(ops.GatedDeltaCall(written, cache[0], cache[1], *rest))
        return others_THV if y_THV is None else others_THV + y_THV

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of convolution and decay."""
        return self.conv1d.weight.data[:, 0], self.A_log.data, self.dt_bias.data

    @staticmethod
    def draft_states(mixers: Sequence[GatedDelta], states: Cache, num_rows: int, dtype: torch.dtype) -> DraftStates:
        """What verifying drafts needs of all mixers of a group, whose states are stacked."""
        return DraftStates(mixers, states, num_rows, dtype)

    def output(self, mixed: torch.Tensor) -> torch.Tensor:
        return self.group.all_reduce(self.out_proj(mixed.flatten(1)))


class DraftStates:
    """Of M layers: the inputs of rows that may be drafts, until it is known which count. See ops/gated_delta."""

    def __init__(self, mixers: Sequence[GatedDelta], states: Cache, num_rows: int, dtype: torch.dtype) -> None:
        self.conv_MPLC, self.state_MPHKV = states
        self.num_key_heads = mixers[0].config.num_key_heads
        conv_weight, decay_log, dt_bias = zip(*(mixer.weights for mixer in mixers))
        self.weights = torch.stack(conv_weight), torch.stack(decay_log), torch.stack(dt_bias)
        shape = len(mixers), num_rows, mixers[0].config.row
        self.kept_MNX = torch.zeros(shape, dtype=dtype, device=states[0].device)

    def accept(self, page_R: torch.Tensor, row_R: torch.Tensor, count_R: torch.Tensor, start_R: torch.Tensor) -> None:
        """The first `count_R` rows of requests, from `row_R` on, count."""
        requests = page_R, row_R, count_R, start_R
        states = self.kept_MNX, self.conv_MPLC, self.state_MPHKV
        ops.gated_delta_accept(ops.DeltaAcceptCall(*states, *requests, *self.weights, self.num_key_heads))


def interleaved_rows(config: GatedDeltaConfig) -> list[Rows]:
    """`in_proj_qkvz` has, key head by key head, its query, its key, the values and z of its value heads; `in_proj_ba`
    their b and a. The order here is all queries, keys, values, z, b, a, of all ranks."""
    per_key_head = config.num_heads // config.num_key_heads
    key_heads = config.num_key_heads * config.num_ranks
    K, values = config.key_dim, per_key_head * config.value_dim
    rows: list[Rows] = []
    for name, sizes in (("in_proj_qkvz", (K, K, values, values)), ("in_proj_ba", (per_key_head, per_key_head))):
        for i, size in enumerate(sizes):
            rows += [(name, head * sum(sizes) + sum(sizes[:i]), size) for head in range(key_heads)]
    return rows
