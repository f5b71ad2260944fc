"""What every MoE layer of a model is given when it is built: how to reach the experts, how to compute them, and the
side stream on which a shared expert overlaps with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from anabranch import kernels, ops
from anabranch.moe.dispatch import Dispatcher, Exchange, LocalDispatcher
from anabranch.parallel.group import ALONE, Group
from anabranch.platforms.platform import InlineStream

if TYPE_CHECKING:
    from anabranch.platforms import Platform, SideStream

S = TypeVar("S", torch.Tensor, tuple[torch.Tensor, torch.Tensor | None])
"""What the side stream computes."""
OVERLAP_TOKENS = 256
"""The largest step that overlaps. With more tokens each computation fills the device by itself and they would slow each
other down. On an H200 decode steps of Qwen1.5-MoE are 2 to 5 % faster with it, up to 256 tokens, the most tried."""
REDUCE_IN_NORM_TOKENS = 64
"""With more tokens the kernels write all rows of the experts and then sum them; the next norm can do that while it
reads. 8,192 tokens of Qwen3-30B-A3B then move 369 MB a layer for both, not 436."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESetup:
    side_stream: SideStream = field(default_factory=InlineStream)
    """Where a shared expert runs."""
    dispatcher: Dispatcher = field(default_factory=LocalDispatcher)
    combine: str = "fastest"
    """How a kernel sums the experts' rows; see ops.experts."""
    reduce_in_norm: int | None = None
    """With more tokens than this the next norm sums the experts' rows; None: never."""
    group: Group = ALONE
    """Ranks that have the same tokens; each computes a part of every expert, or all of some."""
    expert_parallel: bool = False
    """Each rank has some of the experts, not a part of each."""
    exchange: Exchange | None = None
    """Of ranks that have tokens of their own, each of which has some of the experts."""
    expert_slots: int = 0
    """Room for so many experts on each rank, where copies fill what is left; 0: for its share."""


def make_setup(platform: Platform, *, combine: str = "fastest", shared_expert: str = "auto") -> MoESetup:
    """For options as in EngineConfig. Ops must be bound."""
    # Two ways to sum rows, by the number of tokens, may differ in the last bit.
    in_norm = combine in ("fastest", "unfused") and kernels_write_rows() and not kernels.deterministic_bound()
    return MoESetup(
        side_stream=InlineStream() if shared_expert == "inline" else platform.make_side_stream(),
        combine=combine,
        reduce_in_norm=REDUCE_IN_NORM_TOKENS if in_norm else None,
    )


def kernels_write_rows() -> bool:
    """Whether this platform's kernels write the experts' rows anyway, so that summing them in the norm saves work."""
    return ops.experts.has_trait("unreduced_rows") and ops.sum_add_rms_norm.has_trait("sums_rows")


def overlap(
    side_stream: SideStream,
    x_TD: torch.Tensor,
    main: Callable[[torch.Tensor], torch.Tensor],
    side: Callable[[torch.Tensor], S],
) -> tuple[torch.Tensor, S]:
    """(main(x), side(x)), at the same time where the platform has streams and tokens are few. Neither may write to x.

    The main work is enqueued first: in the other order a captured graph spreads over dozens of streams.
    Under a compiler they run one after the other: compiled code runs on one stream.
    """
    if torch.compiler.is_compiling() or x_TD.shape[0] > OVERLAP_TOKENS:
        return main(x_TD), side(x_TD)
    fork = side_stream.fork(x_TD)
    main_TD = main(x_TD)
    with fork.side():
        made = side(x_TD)
    fork.join(*(tensor for tensor in (made if isinstance(made, tuple) else (made,)) if tensor is not None))
    return main_TD, made
