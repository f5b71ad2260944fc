"""How tokens get to the ranks that hold their experts, and back.

T tokens of this rank, D hidden width, K experts per token, M rows that arrive here.

With all experts on one rank nothing moves: the rows are the tokens. Sorting rows by expert is not done here but inside
the `experts` op, because a kernel for few tokens needs no sort. Where ranks have the same tokens, each filters those of
its experts; where they have tokens of their own, rows are exchanged in each direction.

E experts of all ranks, R ranks, P rows after which the choice among copies repeats, N rows that are sent, C = 2 · K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from anabranch.parallel.group import ALONE

if TYPE_CHECKING:
    from anabranch.parallel.group import Group
    from anabranch.parallel.placement import Placement

ALL_TO_ALL_ROWS = 512
"""Rows of the busiest rank above which each row goes only to the ranks that have its experts. With fewer, all go to all
ranks: that moves more bytes, but the host need not wait for numbers of rows. Not measured."""
PERIOD = 64
"""Rows after which the choice among copies repeats: it divides them equally among up to 4 copies, else nearly so."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The experts of the rows that arrived; frozen between dispatch and combine.

    Example: 3 tokens (the last one padding), 2 experts each, experts 0-3 all here:

        expert_MK = [[2 0] [3 2] [−1 −1]]     weight_MK = [[.7 .3] [.6 .4] [0 0]]     num_tokens = 3

    The experts then give row 0 as .7·expert2 + .3·expert0, row 1 as .6·expert3 + .4·expert2, row 2 as zeros. Were
    experts 2 and 3 on another rank, this rank would compute the same rows with [[−1 0] [−1 −1] [−1 −1]], that one with
    [[2 −1] [3 2] ..] in its own numbering, and combine would add the two.
    """

    expert_MK: torch.Tensor
    """int32 ids of experts that live here; −1: elsewhere, or padding."""
    weight_MK: torch.Tensor
    """fp32."""
    num_tokens: int
    """T, the rows that combine returns."""
    sent: Sent | None = None
    """Of rows that went to some ranks only."""
    begin: int = 0
    count: int = 0
    """Where ranks exchange rows: those of the T tokens that this rank has dispatched. Combine returns zeros for others,
    which ranks with the same tokens have dispatched."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Which rows went where, in the order of ranks."""

    token_N: torch.Tensor
    send: list[int]
    """Rows for each rank."""
    receive: list[int]


class Dispatcher(Protocol):
    is_local: bool
    """All experts are on this rank: the rows are the tokens."""

    def dispatch(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatched]:
        """Rows x_MD for the experts of this rank, and what each of them needs."""

    def combine(self, rows_MD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """y_TD: each token's sum over all its experts, from rows that are summed over the experts of one rank."""


class LocalDispatcher:
    """All experts are on this rank."""

    is_local = True

    def dispatch(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatched]:
        return x_TD, Dispatched(expert_TK, weight_TK, x_TD.shape[0])

    def combine(self, rows_MD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return rows_MD


class Slots:
    """Where each rank has the experts of a layer, as tensors. `place` is called once the model has memory, and again
    when experts have moved: the tensors stay, as captured graphs read them."""

    slot_RPE: torch.Tensor
    """See Placement.slots."""

    def __init__(self, placement: Placement, num_experts: int) -> None:
        self.placement, self.num_experts = placement, num_experts
        self.period = PERIOD if sum(map(len, placement.experts)) > num_experts else 1

    def place(self, placement: Placement, device: torch.device | None = None) -> None:
        """`device`: the first time."""
        self.placement = placement
        slot_RPE = torch.tensor(placement.slots(self.num_experts, self.period), dtype=torch.int32)
        if device is not None:
            self.slot_RPE = slot_RPE.to(device)
        else:
            self.slot_RPE.copy_(slot_RPE)

    def of(self, expert_TK: torch.Tensor, rank: int | slice) -> torch.Tensor:
        """The slots of that rank's experts (of several ranks: a dimension more); −1: the row goes to another rank."""
        slot_PE = self.slot_RPE[rank]
        if self.period == 1:
            return slot_PE[..., 0, expert_TK]
        row_T1 = torch.arange(expert_TK.shape[0], device=expert_TK.device)[:, None] % self.period
        return slot_PE[..., row_T1, expert_TK]


class FilteringDispatcher(LocalDispatcher):
    """Every rank of a group has all tokens and some experts: nothing moves, and each rank's rows are terms of a sum
    over the group."""

    is_local = False

    def __init__(self, rank: int, slots: Slots) -> None:
        self.rank, self.slots = rank, slots

    def dispatch(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatched]:
        return super().dispatch(x_TD, weight_TK, self.slots.of(expert_TK, self.rank))


class Exchange:
    """What the MoE layers of a model share whose ranks have tokens of their own."""

    def __init__(self, group: Group, same: Group = ALONE) -> None:
        self.group = group
        self.same = same
        """Ranks among them that have the same tokens as this one: each dispatches a part of these."""
        self.most = 0
        """Tokens of the rank that has most of them in this step; 0: all have as many."""


class ExchangingDispatcher:
    """Every rank has tokens of its own and some experts. Results are summed in the order of ranks."""

    is_local = False

    def __init__(self, exchange: Exchange, slots: Slots) -> None:
        self.exchange, self.slots = exchange, slots

    def dispatch(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatched]:
        same, num_tokens = self.exchange.same, x_TD.shape[0]
        share = -(-num_tokens // same.size)
        begin = min(num_tokens, same.rank * share)
        mine = slice(begin, min(num_tokens, begin + share))
        rows = x_TD[mine], weight_TK[mine], expert_TK[mine]
        if self.exchange.most > ALL_TO_ALL_ROWS * same.size:
            x_MD, dispatched = self._to_some(*rows)
        else:
            x_MD, dispatched = self._to_all(*rows, -(-max(self.exchange.most, num_tokens) // same.size))
        return x_MD, replace(dispatched, num_tokens=num_tokens, begin=begin, count=mine.stop - begin)

    def combine(self, rows_MD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        begin, count = dispatched.begin, dispatched.count
        y_TD = self._returned(rows_MD, dispatched.sent, count)
        after = dispatched.num_tokens - begin - count
        return y_TD if self.exchange.same.size == 1 else torch.nn.functional.pad(y_TD, (0, 0, begin, after))

    def _returned(self, rows_MD: torch.Tensor, sent: Sent | None, num_tokens: int) -> torch.Tensor:
        group = self.exchange.group
        if sent is None:
            count = rows_MD.shape[0] // group.size
            every = [count] * group.size
            return group.all_to_all(rows_MD, every, every).view(group.size, count, -1).sum(0)[:num_tokens]
        rows_ND = group.all_to_all(rows_MD, sent.receive, sent.send)
        y_TD = torch.zeros(num_tokens, rows_MD.shape[1], device=rows_MD.device)
        for rows, token in zip(rows_ND.split(sent.send), sent.token_N.split(sent.send), strict=True):
            y_TD.index_add_(0, token, rows.float())
        return y_TD.to(rows_MD.dtype)

    def _to_all(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, Dispatched]:
        """All rows to all ranks, padded to the same number."""
        group, (num_tokens, top_k) = self.exchange.group, expert_TK.shape
        both_TC = torch.cat((expert_TK, weight_TK.view(torch.int32)), 1)  # one exchange for both
        if padding := num_rows - num_tokens:
            x_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, padding))
            both_TC = torch.nn.functional.pad(both_TC, (0, 0, 0, padding))
            both_TC[num_tokens:, :top_k] = -1
        x_MD = group.all_gather(x_TD)
        expert_MK, weight_MK = group.all_gather(both_TC).split(top_k, 1)
        weight_MK = weight_MK.contiguous().view(torch.float32)
        return x_MD, Dispatched(self.slots.of(expert_MK, group.rank), weight_MK, num_tokens)

    def _to_some(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatched]:
        """Each row once to every rank that has one or more of its experts. Waits for the device."""
        group, top_k = self.exchange.group, expert_TK.shape[1]
        slot_RTK = self.slots.of(expert_TK, slice(None))
        rank_N, token_N = (slot_RTK >= 0).any(2).nonzero(as_tuple=True)
        send_R = rank_N.bincount(minlength=group.size)
        one = [1] * group.size
        send, receive = torch.stack((send_R, group.all_to_all(send_R, one, one))).tolist()
        both_NC = torch.cat((slot_RTK[rank_N, token_N], weight_TK[token_N].view(torch.int32)), 1)
        x_MD = group.all_to_all(x_TD[token_N], send, receive)
        expert_MK, weight_MK = group.all_to_all(both_NC, send, receive).split(top_k, 1)
        dispatched = Dispatched(
            expert_MK.contiguous(),
            weight_MK.contiguous().view(torch.float32),
            x_TD.shape[0],
            Sent(token_N, send, receive),
        )
        return x_MD, dispatched
