"""Experts of a layer move between ranks, so that ranks have about the same load.

S experts that a rank has room for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from anabranch.ops.weight import Weight
from anabranch.parallel.placement import Placement, balanced

if TYPE_CHECKING:
    from anabranch.moe.layer import RoutedExperts
    from anabranch.parallel.group import Group

log = logging.getLogger(__name__)

WORTH = 0.95
"""Experts move if the busiest rank then has less than this share of the load that it has now."""


def rebalance(layer: RoutedExperts, load_E: Sequence[float], group: Group) -> bool:
    """Whether experts have moved. All ranks call this with the same loads, between two steps; they have the same room
    for experts."""
    slots = layer.slots
    assert slots is not None
    old = slots.placement
    new = old.moved_to(balanced(load_E, old.num_ranks, len(old.experts[0])))
    if max(new.loads(load_E)) >= WORTH * max(old.loads(load_E)):
        return False
    weights = (weight for weight in layer.experts.children() if isinstance(weight, Weight))
    move((tensor for weight in weights for tensor in weight.tensors.values()), old, new, group)
    slots.place(new)
    log.info("experts of a layer have moved: %s → %s", old.experts, new.experts)
    return True


def move(tensors: Iterable[torch.Tensor], old: Placement, new: Placement, group: Group) -> None:
    """Each rank's experts, the first dimension of the tensors, become those of `new`: what a rank does not have comes
    from the first that has it."""
    ranks_of = old.ranks_of(1 + max(max(experts) for experts in old.experts))
    moves = [
        (ranks_of[expert][0], target, slot, expert)
        for target, (before, after) in enumerate(zip(old.experts, new.experts, strict=True))
        for slot, expert in enumerate(after)
        if before[slot] != expert
    ]
    sent = [(target, old.experts[source].index(e)) for source, target, _, e in moves if source == group.rank]
    received = sorted((source, slot) for source, target, slot, _ in moves if target == group.rank)
    send = [sum(target == rank for target, _ in sent) for rank in range(group.size)]
    receive = [sum(source == rank for source, _ in received) for rank in range(group.size)]
    for tensor in tensors:
        data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # FP8 cannot be indexed everywhere
        from_S, to_S = (
            torch.tensor([slot for _, slot in some], dtype=torch.int64, device=data.device) for some in (sent, received)
        )
        data.index_copy_(0, to_S, group.all_to_all(data.index_select(0, from_S), send, receive))
