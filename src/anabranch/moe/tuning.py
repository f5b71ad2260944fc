"""At start: measure which tiles compute a model's experts fastest on this device, unless a table has them already.

Which tiles there are and how they are timed is the business of the kernel's tuner (kernels/tuning/experts_tuner).
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from anabranch import ops
from anabranch.moe.layer import RoutedExperts
from anabranch.ops.weight import Weight

if TYPE_CHECKING:
    from anabranch.kernels.tuning.search import Progress
    from anabranch.platforms import Platform

log = logging.getLogger(__name__)


def find_tuner() -> Any:
    """The module that tunes this platform's kernel of the experts; None where there is nothing to tune."""
    return importlib.import_module(ops.experts.tuner) if ops.experts.tuner else None


def tune(
    model: nn.Module, platform: Platform, level: str, most_tokens: int, progress: Progress | None = None
) -> list[str]:
    """For each shape of experts in the model: find a table, or measure one. Returns a line for each measured shape.

    Uses the model's own weights, of several layers in rotation, so nothing is allocated for them. If the tuner fails,
    the failure is logged and the built-in tiles are used.
    """
    tuner = find_tuner() if level != "off" else None
    if tuner is None:
        return []
    done = []
    for (shape, activation), weights in shapes_of(model).items():
        try:
            tuned = tuner.ensure(tuner.Shape(*shape), weights, activation, platform, level, most_tokens, progress)
        except Exception:  # of the compiler, the driver or the disk
            log.warning("tuning failed: the built-in tiles are used", exc_info=True)
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
