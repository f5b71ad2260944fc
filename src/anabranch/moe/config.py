"""What the experts of a layer are. Without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    num_experts: int
    top_k: int
    width: int
    renormalize: bool
    """The weights of the chosen experts are divided by their sum."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's logits become weights; see ops.RouteCall."""
    selection_bias: bool = False
    """The router has a learned number for each expert, added for the selection only."""
    num_groups: int = 1
    top_groups: int = 1
    """Experts are chosen from the best `top_groups` of `num_groups` groups."""
    scaling: float = 1.0
    """The weights are × this."""
    shared_width: int = 0
    """Width of the always-on shared expert; 0: none."""
    shared_gate: bool = False
    """The shared expert's result is × sigmoid of a learned projection."""
    router_scales: bool = False
    """The router has a learned factor for each input channel and for each expert."""
    bias: bool = False
    """Router and experts have biases."""
    interleaved: bool = False
    """In checkpoints, gate and up rows of an expert alternate, and plain matrices are transposed."""
