"""What the experts of a layer are. Without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    num_experts: int
    top_k: int
    width: int
    renormalize: bool
    shared_width: int = 0
    """Width of the always-on shared expert; 0: none."""
    shared_gate: bool = False
    """The shared expert's result is × sigmoid of a learned projection."""
    router_scales: bool = False
    """The router has a learned factor for each input channel and for each expert."""
