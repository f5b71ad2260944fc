"""How MoE layers are to be computed, where there is a choice: set on a model before it has memory and weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from anabranch import ops
from anabranch.moe.experts import Experts
from anabranch.moe.layer import SUM_LATER, MoELayer
from anabranch.platforms.platform import InlineStream


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEOptions:
    """As in EngineConfig, which checks them."""

    combine: str = "fastest"
    shared_expert: str = "stream"


def apply(options: MoEOptions, model: nn.Module) -> None:
    """Every module keeps what it is told, so that two models in one process may differ. Ops are bound before."""
    num_packed = 0
    sum_later = SUM_LATER if options.combine in ("fastest", "unfused") and sums_later() else None
    for module in list(model.modules()):
        if isinstance(module, Experts):
            module.combine = options.combine
        if isinstance(module, MoELayer):
            module.sum_later = sum_later
        if options.shared_expert == "inline" and hasattr(module, "side_stream"):
            module.side_stream = InlineStream()  # type: ignore[assignment]
        if options.shared_expert == "packed" and isinstance(module, MoELayer) and module.shared_expert is not None:
            module.pack_shared_expert()
            num_packed += 1
    if options.shared_expert == "packed" and not num_packed:
        raise ValueError("shared_expert packed: this model has no shared expert among its experts; use stream")


def sums_later() -> bool:
    """Whether the kernels of this platform gain by it: Triton's write experts' rows anyway, and its norm sums them."""
    return all(op.bound and op.bound[0].provider == "triton" for op in (ops.experts, ops.sum_add_rms_norm))
