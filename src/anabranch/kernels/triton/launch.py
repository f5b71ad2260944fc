"""How kernels are launched: what the device allows beside the plain launch."""

from __future__ import annotations

import functools

import torch


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before its predecessor is done (it waits on the device): Hopper and later."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
