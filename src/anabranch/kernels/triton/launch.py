"""How kernels are launched: what the device allows beside the plain launch, and the arithmetic of grids.

Not Triton's own `cdiv` and `next_power_of_2`: those are made for kernels and take microseconds when called from Python,
and a layer would call them twenty times.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched before its predecessor is done (it waits on the device): Hopper and later."""
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    return nvidia and torch.cuda.get_device_capability(device) >= (9, 0)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """No less than n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0
