"""At start: measure how a model's experts are best computed on this device, if nobody has yet.

Which tiles there are and how they are timed is the kernels' affair (kernels/tuning, kernels/triton/experts_tuner).
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from anabranch import ops
from anabranch.moe.layer import RoutedExperts
from anabranch.ops.weight import Weight

if TYPE_CHECKING:
    from anabranch.kernels.tuning import Progress
    from anabranch.platforms import Platform

log = logging.getLogger(__name__)


def can_be_tuned() -> bool:
    """Whether the experts' kernel of this platform has tiles to choose: Triton's has."""
    return bool(ops.experts.bound) and ops.experts.bound[0].provider == "triton"


def tune(
    model: nn.Module, platform: Platform, level: str, most_tokens: int, progress: Progress | None = None
) -> list[str]:
    """For each shape of experts in the model: a table that fits, measured now if there is none. Says what was done.

    The model's own weights serve, of several layers in turn, so nothing is allocated for them. A tuner that fails is
    a start with the built-in tiles, and no more than a line in the log.
    """
    if level == "off" or not can_be_tuned():
        return []
    tuner = importlib.import_module("anabranch.kernels.triton.experts_tuner")
    done = []
    for (shape, activation), weights in shapes_of(model).items():
        try:
            tuned = tuner.ensure(tuner.Shape(*shape), weights, activation, platform, level, most_tokens, progress)
        except Exception:  # whatever compiler, driver or disk may come up with
            log.warning("tuning failed: the experts go by their rule", exc_info=True)
            continue
        if tuned.measured:
            done.append(f"{len(tuned.measured)} token counts of {shape} in {tuned.seconds:.1f} s")
            log.info("tuned %s", done[-1])
    return done


Key = tuple[tuple[int, int, int, int, torch.dtype, str], str]
"""(E, D, I, K, dtype, format of the weights), activation."""


def shapes_of(model: nn.Module) -> dict[Key, list[tuple[Weight, Weight]]]:
    """The weights of the layers of each shape."""
    found: dict[Key, list[tuple[Weight, Weight]]] = {}
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            experts, top_k = layer.experts, layer.router.top_k
            shape = *experts.down_EDI.shape, top_k, experts.down_EDI.dtype, experts.gate_up_EFD.format.name
            found.setdefault((shape, experts.activation), []).append((experts.gate_up_EFD, experts.down_EDI))  # type: ignore[arg-type]
    return found
