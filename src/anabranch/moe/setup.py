"""What every MoE layer of a model is given when it is built: how to reach the experts, and how to compute them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch import ops
from anabranch.moe.dispatch import Dispatcher, LocalDispatcher
from anabranch.platforms.platform import InlineStream

if TYPE_CHECKING:
    from anabranch.platforms import Platform, SideStream

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


def make_setup(platform: Platform, *, combine: str = "fastest", shared_expert: str = "auto") -> MoESetup:
    """For options as in EngineConfig. Ops must be bound."""
    in_norm = combine in ("fastest", "unfused") and kernels_write_rows()
    return MoESetup(
        side_stream=InlineStream() if shared_expert == "inline" else platform.make_side_stream(),
        combine=combine,
        reduce_in_norm=REDUCE_IN_NORM_TOKENS if in_norm else None,
    )


def kernels_write_rows() -> bool:
    """Whether this platform's kernels write the experts' rows anyway, so that summing them in the norm saves work."""
    return ops.experts.has_trait("unreduced_rows") and ops.sum_add_rms_norm.has_trait("sums_rows")
