"""A rank's part in the steps of a model that is divided among ranks: what all must know before a step, what those do
that follow, and which experts each has. Knows no processes: `runner` tells the others.

R rows that sample, T token rows, L MoE layers, E experts.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

from anabranch.config import EngineConfig
from anabranch.engine.batch import HostStep
from anabranch.engine.layer_drafts import known_next
from anabranch.engine.outputs import prompt_parts, sampling_shares
from anabranch.engine.runner import Progress
from anabranch.engine.sampling_plan import SamplingMode
from anabranch.engine.scheduler import Share
from anabranch.engine.torch_runner import TorchRunner
from anabranch.moe.dispatch import Exchange
from anabranch.moe.rebalance import rebalance
from anabranch.parallel.group import PRESENCE, Group, on_host, split
from anabranch.platforms import Platform


class Order(NamedTuple):
    """A step for a rank that follows."""

    rows: HostStep
    mode: SamplingMode | None
    """How a captured decode step samples; None: the step is not to be looked for among these."""
    tables: list[tuple[int, list[array[int]]]]
    """Changes of the flat page tables: where they begin, and for each cache group the entries."""
    prompt_rows: list[tuple[int, int]]
    """(first row, count) of rows whose logits the driver needs for the log-probabilities of a prompt."""
    slots: list[int]
    """Of the rows that sample."""
    known_next: list[tuple[int, int]]
    """For a draft layer; see engine/layer_drafts."""
    most: int = 0
    """See moe.dispatch.Exchange."""


class RankRunner(TorchRunner):
    placed_LE: torch.Tensor | int = 0
    """Tokens by MoE layer and expert when experts were divided among ranks the last time."""

    def __init__(self, config: EngineConfig, platform: Platform, progress: Progress | None, group: Group) -> None:
        exchange = None
        if config.data_parallel_size > 1:
            every, group = group, split(group, config.tensor_parallel_size)
            exchange, self.host_group = Exchange(every, group), on_host(every, config.tensor_parallel_size)
        super().__init__(config, platform, progress, group, exchange)

    def agree(self, shares: list[Share], rows: HostStep, mode: SamplingMode | None) -> SamplingMode | None:
        if self.exchange is not None:
            mode = self._agree(len(rows.slots), mode)
        if self.model.group.size > 1:
            parts = prompt_parts(shares) if self.slots.prompt_rows else ()
            slots = [share.sequence.slot for share in sampling_shares(shares, rows)]
            known = known_next(shares, rows) if self.layer_drafts is not None else []
            most = 0 if self.exchange is None else self.exchange.most
            prompt_rows = [(row, len(targets)) for _, row, targets in parts]
            self.announce(Order(rows, mode, [], prompt_rows, slots, known, most))
        return mode

    def _agree(self, num_rows: int, mode: SamplingMode | None) -> SamplingMode | None:
        """Where ranks have requests of their own: how many rows the busiest has, and whether all can replay a captured
        step. Returns the mode, or None if one of them cannot."""
        assert self.exchange is not None
        rows_R, captured_R = self.host_group.all_gather(torch.tensor([[num_rows], [bool(mode)]]), dim=1)
        self.exchange.most = int(rows_R.max())
        PRESENCE.begin(num_rows)
        return mode if captured_R.all() else None

    def announce(self, order: Order) -> None:
        """Those with the same tokens are to launch this too."""
        raise NotImplementedError

    def join(self) -> None:
        mode = self._agree(0, None if self.forward.decodes is None else "greedy")
        assert self.exchange is not None
        order = Order(HostStep([], [], [], [0], None, 1), mode, [], [], [], [], self.exchange.most)
        if self.model.group.size > 1:
            self.announce(order)
        self._take_part(order)

    def _take_part(self, order: Order) -> None:
        """A step in which this rank, and those with the same tokens, have no rows."""
        with torch.inference_mode(), self.platform.step(0):
            if self.replay(order.rows, order.mode) is None:
                self.experts.record(False)
                self.model(self.steps.unpack(self.steps.padding(1), 1, padded=True), self.kv)

    def follow(self, order: Order) -> None:
        """Launch what the driver launches, with the collectives of its outputs, but without sampling: its tokens are
        received."""
        rows = order.rows
        if self.exchange is not None:
            self.exchange.most = order.most
        self.steps.apply(order.tables)
        if not rows.slots:
            return self._take_part(order)
        with torch.inference_mode(), self.platform.step(len(rows.slots) * self.num_active):
            decoded = self.replay(rows, order.mode)
            if decoded is not None:
                if order.mode != "any":
                    return  # its tokens were received in the graph
                step, hidden_TD = None, decoded.hidden_RD
            else:
                step, hidden_TD, _ = self.forward.run(rows, False)
                for begin, count in order.prompt_rows:
                    self.model.logits(hidden_TD[begin : begin + count])
                if order.slots:
                    self.outputs.logits(step, hidden_TD)
            token_R = None
            if order.slots:
                token_R = torch.empty(len(order.slots), dtype=torch.int64, device=self.platform.device)
                token_R = self.model.group.broadcast(token_R)
                self.steps.keep_tokens(order.slots, token_R)
            if self.layer_drafts is not None:
                self.layer_drafts.after_any(rows, order.known_next, token_R, step, hidden_TD)

    def rebalance(self) -> None:
        """All ranks call this at the same time, between two steps. What they decide follows from the same numbers."""
        counter, exchange = self.experts, self.exchange
        count_LE = counter.count_LE.clone()
        if exchange and exchange.same.rank:  # the first of those with the same tokens counts them
            count_LE.zero_()
        group = exchange.group if exchange else self.model.group
        count_LE = group.all_reduce(count_LE) if exchange else group.broadcast(count_LE)
        load_LE, self.placed_LE = (count_LE - self.placed_LE).tolist(), count_LE
        with torch.inference_mode():
            for layer, load_E in zip(counter.layers, load_LE, strict=True):
                rebalance(layer, load_E, group)

    def expert_ranks(self) -> list[list[tuple[int, ...]]]:
        return [list(layer.slots.placement.experts) for layer in self.experts.layers if layer.slots is not None]
