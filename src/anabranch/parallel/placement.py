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

    def slots(self, num_experts: int, period: int) -> list[list[list[int]]]:
        """[rank][row mod period][expert] → where among the rank's experts the row finds that one; −1: it goes to
        another rank. Copies take turns, so every row of every expert has one rank. One column more, of −1, for the
        expert −1 of padding."""
        found = [[[-1] * (num_experts + 1) for _ in range(period)] for _ in self.experts]
        for expert, ranks in enumerate(self.ranks_of(num_experts)):
            for row in range(period):
                rank = ranks[(row + expert) % len(ranks)]
                found[rank][row][expert] = self.experts[rank].index(expert)
        return found

    def loads(self, load_E: Sequence[float]) -> list[float]:
        """Of each rank, where copies of an expert share its load."""
        copies = Counter(expert for experts in self.experts for expert in experts)
        return [sum(load_E[expert] / copies[expert] for expert in experts) for experts in self.experts]

    def moved_to(self, wanted: Placement) -> Placement:
        """`wanted`, with few experts moved: each rank gets that of its sets of experts which it has most of, and those
        that stay keep their place. Room that `wanted` leaves keeps what is there: one more copy. Ranks have the same
        room."""
        sets = [set(experts) for experts in wanted.experts]
        placed = []
        for held in self.experts:
            most = max(range(len(sets)), key=lambda number: (len(sets[number] & set(held)), -number))
            chosen = sets.pop(most)
            incoming = sorted(chosen - set(held), reverse=True)
            placed.append(tuple(e if e in chosen or not incoming else incoming.pop() for e in held))
        return Placement(tuple(placed))


def in_order(num_experts: int, num_ranks: int, slots: int = 0) -> Placement:
    """Neighbouring experts on each rank; where they cannot be divided equally, some ranks have one more. With room for
    `slots` experts on each rank, copies of those that follow fill it."""
    bounds = [-(-num_experts * rank // num_ranks) for rank in range(num_ranks + 1)]
    return Placement(
        tuple(
            tuple(expert % num_experts for expert in range(begin, max(end, begin + min(slots, num_experts))))
            for begin, end in pairwise(bounds)
        )
    )


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
