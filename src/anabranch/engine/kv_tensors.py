"""The pages themselves: one key and one value tensor a layer, shaped by that layer's geometry.

P pages, S slots in a page, G key-value heads, D head dim.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from anabranch.layers.mixer import Cache
from anabranch.models.config import ModelConfig


def allocate(
    config: ModelConfig, num_pages: Sequence[int], page_size: int, dtype: torch.dtype, device: torch.device
) -> list[Cache]:
    """Zeroed pages for every layer; `num_pages` gives a number for each of config.kv_groups.

    Zeroed, because kernels read whole pages and a masked weight of 0 does not cancel a stray NaN.
    """
    layers: dict[int, Cache] = {}
    for group, pages in zip(config.kv_groups, num_pages, strict=True):
        shape = (2, pages, page_size, group.num_kv_heads, group.head_dim)
        for layer_id in group.layers:
            k_PSGD, v_PSGD = zeros(shape, dtype, device)
            layers[layer_id] = k_PSGD, v_PSGD
    return [layers[layer_id] for layer_id in range(len(config.layers))]


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    size = math.prod(shape)
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Host memory that the system zeroes when it is first touched: torch would touch all of it now, which takes seconds.
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype=dtype).view(shape)
