"""Keys and values in pages, as engine.kv_cache allocates them. Knows slots, not requests.

N tokens, G key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from anabranch.models.config import ModelConfig


class Pool:
    def __init__(self, model: ModelConfig, num_pages: Sequence[int], page_size: int, dtype: Any) -> None:
        self.groups = model.cache_groups
        self.page_size = page_size
        self.k: list[mx.array] = [None] * len(model.layers)
        """Per layer [slots, G, D]; a slot is page · page size + offset."""
        self.v: list[mx.array] = [None] * len(model.layers)
        for group, pages in zip(self.groups, num_pages, strict=True):
            for layer_id in group.layers:
                arrays = [mx.zeros((pages * page_size, *shape), dtype) for shape in group.spec.shapes]
                self.k[layer_id], self.v[layer_id] = arrays
        mx.eval(self.k, self.v)
        self.changed = False

    def slots(self, table: Sequence[int], begin: int, end: int) -> mx.array:
        """Of the tokens [begin, end) of a sequence with these pages."""
        size = self.page_size
        return mx.array([table[i // size] * size + i % size for i in range(begin, end)], mx.int32)

    def write(self, layer_id: int, slot_N: mx.array, k_GND: mx.array, v_GND: mx.array) -> None:
        self.k[layer_id][slot_N] = k_GND.swapaxes(0, 1)
        self.v[layer_id][slot_N] = v_GND.swapaxes(0, 1)
        self.changed = True

    def read(self, layer_id: int, slot_N: mx.array) -> tuple[mx.array, mx.array]:
        """Two of [1, G, N, D]."""
        k_NGD, v_NGD = self.k[layer_id][slot_N], self.v[layer_id][slot_N]
        return k_NGD.swapaxes(0, 1)[None], v_NGD.swapaxes(0, 1)[None]

    def take_changes(self) -> list[mx.array]:
        """What has to be evaluated for the writes since the last call to have happened."""
        changed, self.changed = self.changed, False
        return [*self.k, *self.v] if changed else []
