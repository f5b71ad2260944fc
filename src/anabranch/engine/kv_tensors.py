"""The pages themselves: the tensors of every layer, shaped as its CacheSpec says; and what becomes of states between
steps.

P pages, S tokens in a page, L layers of a group.
"""

import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from anabranch.engine.batch import StepMaker, Tried
from anabranch.engine.runner import StateCopy
from anabranch.layers.cache import CacheSpec
from anabranch.layers.mixer import Cache
from anabranch.models.config import ModelConfig
from anabranch.models.decoder import Decoder


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


def draft_bytes(config: ModelConfig, num_rows: int, dtype: torch.dtype) -> int:
    """Of what mixers keep of a step of `num_rows` rows."""
    kept = [layer.mixer for layer in config.layers if not layer.mixer.cache.policy.per_token]
    return num_rows * sum(mixer.values_per_row for mixer in kept) * dtype.itemsize


class States:
    """The states of requests. There may be no layer that has any."""

    def __init__(self, model: Decoder, kv: list[Cache], num_rows: int, dtype: torch.dtype) -> None:
        """`kv`, the caches of all layers, also gets what mixers keep of steps of up to `num_rows` rows with drafts; 0:
        there are no drafts."""
        self.by_group = stack_states(model.config, kv)
        self.kept: dict[int, Any] = {}
        """Of each group with states, if there may be drafts: what its mixers keep until `settle`."""
        for group, states in self.by_group.items() if num_rows else ():
            layers = model.config.cache_groups[group].layers
            mixers: list[Any] = [model.layers[layer_id].mixer for layer_id in layers]
            self.kept[group] = mixers[0].draft_states(mixers, states, num_rows, dtype)
            for layer_id, kept_NX in zip(layers, self.kept[group].kept_MNX, strict=True):
                kv[layer_id] = *kv[layer_id], kept_NX

    @torch.inference_mode()
    def copy(self, copies: list[StateCopy]) -> None:
        for group, source, target in copies:
            for state_LP in self.by_group[group]:
                state_LP[:, target].copy_(state_LP[:, source])

    @torch.inference_mode()
    def settle(self, tried: list[Tried], steps: StepMaker) -> None:
        tried = tried + [(0, 0, 0, 0)] * (-len(tried) % 4)  # kernels are compiled apart for other addresses
        slots, *rest = map(list, zip(*tried, strict=True))
        for group, kept in self.kept.items():
            pages = [steps.host_tables[group][slot * steps.width] for slot in slots]
            kept.accept(*steps.upload_rows([pages, *rest]))
