"""Random weights without files, for benchmarks: every parameter uniform in ±1e-3, drawn on the device."""

from __future__ import annotations

import torch
from torch import nn

from anabranch.formats import PLAIN
from anabranch.ops.weight import Weight


def fill(model: nn.Module, seed: int = 0) -> None:
    """Norm weights too, as other engines draw them, so that their figures can be compared."""
    generators: dict[torch.device, torch.Generator] = {}

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        generator = generators.get(tensor.device)
        if generator is None:
            generator = generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        return tensor.uniform_(-1e-3, 1e-3, generator=generator)

    for module in model.modules():
        if isinstance(module, Weight) and module.format is not PLAIN:
            dense = draw(torch.empty(module.shape, dtype=module.dtype, device=module.device))
            for name, tensor in module.format.quantize(dense).items():
                module.tensors[name].copy_(tensor)
        else:
            for parameter in module.parameters(recurse=False):
                draw(parameter)
