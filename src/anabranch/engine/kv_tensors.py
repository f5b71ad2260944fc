"""The pages themselves: the tensors of every layer, shaped as its CacheSpec says.

P pages, S tokens in a page, L layers of a group.
"""

import math
import mmap
from collections.abc import Sequence

import torch

from anabranch.layers.cache import CacheSpec
from anabranch.layers.mixer import Cache
from anabranch.models.config import ModelConfig


def allocate(
    config: ModelConfig, num_pages: Sequence[int], page_size: int, dtype: torch.dtype, device: torch.device
) -> list[Cache]:
    """Zeroed pages for every layer; `num_pages` gives a number for each of config.cache_groups.

    The states of a group's layers are one after another in memory: see `stack_states`.
    Zeroed, because kernels read whole pages and a masked weight of 0 does not cancel a stray NaN.
    """
    layers: dict[int, Cache] = {}
    for group, pages in zip(config.cache_groups, num_pages, strict=True):
        if not group.policy.per_token:
            states = allocate_layer(group.spec, len(group.layers) * pages, page_size, dtype, device)
            layers |= zip(group.layers, zip(*(state.view(-1, pages, *state.shape[1:]) for state in states)))
            continue
        for layer_id in group.layers:
            layers[layer_id] = allocate_layer(group.spec, pages, page_size, dtype, device)
    return [layers[layer_id] for layer_id in range(len(config.all_layers))]


def stack_states(config: ModelConfig, layers: Sequence[Cache]) -> dict[int, Cache]:
    """Of each group with states, the tensors of all its layers in one, [L, P, *shape]; `layers` as `allocate` gives
    them."""
    return {
        index: tuple(
            state.as_strided((len(group.layers), *state.shape), (state.numel(), *state.stride()))
            for state in layers[group.layers[0]]
        )
        for index, group in enumerate(config.cache_groups)
        if not group.policy.per_token
    }


def allocate_layer(spec: CacheSpec, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> Cache:
    """[P, S, *shape] for each shape, or [P, *shape] where a page is one state; all in one piece of memory."""
    if spec.dtype is not None:
        dtype = getattr(torch, spec.dtype)
    leading = (num_pages, page_size) if spec.policy.per_token else (num_pages,)
    shapes = [(*leading, *shape) for shape in spec.shapes]
    sizes = [math.prod(shape) for shape in shapes]
    return tuple(
        part.view(shape) for part, shape in zip(zeros((sum(sizes),), dtype, device).split(sizes), shapes, strict=True)
    )


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    size = math.prod(shape)
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Host memory that the system zeroes when it is first touched: torch would touch all of it now, which takes seconds.
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize), dtype=dtype).view(shape)
