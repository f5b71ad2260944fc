"""How tokens get to the ranks that hold their experts, and back.

T tokens of this rank, D hidden width, K experts per token, M rows that arrive here.

With all experts on one rank nothing moves: the rows are the tokens. Sorting rows by expert is not done here but inside
the `experts` op, because a kernel for few tokens needs no sort. Expert parallelism is this contract plus a collective
in each direction.
"""

from dataclasses import dataclass
from typing import Protocol

import torch


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


class FilteringDispatcher:
    """Every rank of a group has all tokens and some experts, `count` of them from `first` on: nothing moves, and each
    rank's rows are terms of a sum over the group."""

    is_local = False

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def dispatch(
        self, x_TD: torch.Tensor, weight_TK: torch.Tensor, expert_TK: torch.Tensor
    ) -> tuple[torch.Tensor, Dispatched]:
        local_TK = expert_TK - self.first
        here_TK = (local_TK >= 0) & (local_TK < self.count)
        return x_TD, Dispatched(torch.where(here_TK, local_TK, -1), weight_TK, x_TD.shape[0])

    def combine(self, rows_MD: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return rows_MD
