"""Random weights without files, for benchmarks: every parameter uniform in ±1e-3, drawn on the device."""

import torch
from torch import nn


def fill(model: nn.Module, seed: int = 0) -> None:
    """Norm weights too, as other engines draw them, so that their figures can be compared."""
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        generator = generators.get(parameter.device)
        if generator is None:
            generator = generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
        parameter.uniform_(-1e-3, 1e-3, generator=generator)
