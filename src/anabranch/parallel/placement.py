"""Which rank has which experts, with copies of busy ones.

E experts, R ranks.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Placement:
    """Example, 4 experts on 2 ranks with room for 3 each: ((0, 1, 2), (2, 3, 0)) has two copies of experts 0 and 2."""

    experts: tuple[tuple[int, ...], ...]
    """Of each rank."""

    @property
    def num_ranks(self) -> int:
        return len(self.experts)

    def ranks_of(self, num_experts: int) -> list[list[int]]:
        """For each expert, the ranks that have it."""
        found: list[list[int]] = [[] for _ in range(num_experts)]
        for rank, experts in enumerate(self.experts):
            for expert in experts:
                found[expert].append(rank)
        return found


def in_order(num_experts: int, num_ranks: int) -> Placement:
    """Neighbouring experts on each rank; where they cannot be divided equally, the first ranks have one more."""
    bounds = [-(-num_experts * rank // num_ranks) for rank in range(num_ranks + 1)]
    return Placement(tuple(tuple(range(begin, end)) for begin, end in pairwise(bounds)))


def balanced(load_E: Sequence[float], num_ranks: int, slots: int) -> Placement:
    """Room for `slots` experts on each rank, filled so that ranks have about the same load: spare room goes to copies
    of the experts with the most load a copy, and the busiest copies are placed first, each on the rank with the least
    load that has room for it and does not have that expert yet."""
    num_experts = len(load_E)
    if num_ranks * slots < num_experts:
        raise ValueError(f"{num_experts} experts do not fit on {num_ranks} ranks with room for {slots} each")
    copies = [1] * num_experts
    most = [(-Fraction(load), expert) for expert, load in enumerate(load_E)]
    heapq.heapify(most)
    for _ in range(num_ranks * slots - num_experts):
        while most and copies[most[0][1]] == num_ranks:  # every rank has it
            heapq.heappop(most)
        if not most:
            break
        expert = most[0][1]
        copies[expert] += 1
        heapq.heapreplace(most, (-Fraction(load_E[expert]) / copies[expert], expert))
    parts = sorted(
        ((load_E[expert] / count, expert) for expert, count in enumerate(copies) for _ in range(count)), reverse=True
    )
    loads, held = [0.0] * num_ranks, [list[int]() for _ in range(num_ranks)]
    for load, expert in parts:
        free = [rank for rank in range(num_ranks) if len(held[rank]) < slots]
        # If all ranks with room have it already, a second copy there is wasted room, but no error.
        fresh = [rank for rank in free if expert not in held[rank]] or free
        rank = min(fresh, key=lambda rank: (loads[rank], rank))
        held[rank].append(expert)
        loads[rank] += load
    return Placement(tuple(tuple(sorted(Counter(experts))) for experts in held))
