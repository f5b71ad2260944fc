"""The working copy of keys and values: mlx_lm's caches of some rows, which join and leave by merge, extract and filter.

One row has mlx_lm's plain caches, whose attention needs no mask; several have its batched ones, padded on the left.
Layers with a window keep only that. Knows nothing of pages and memory.

B rows, T tokens, V vocabulary, N tokens, G key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, KVCache, RotatingKVCache

from anabranch.engine.scheduler import Sequence


@dataclass(slots=True, eq=False)
class Row:
    """A running sequence as the caches see it."""

    sequence: Sequence
    slot: int
    """The sequence's when it joined: if it has another now, or none, it has left."""
    tables: list[list[int]]
    """Its pages, per cache group; the lists of engine.kv_cache itself."""
    length: int
    """Tokens computed."""
    saved: int
    """Those of them that are in pages too."""


def empty_caches(windows: Iterable[int]) -> list[Any]:
    return [RotatingKVCache(max_size=window) if window else KVCache() for window in windows]


def filled_cache(window: int, length: int, k_1GND: mx.array, v_1GND: mx.array) -> Any:
    """A layer's cache after `length` tokens, from their last N: all of them, or a window's."""
    if window:
        return RotatingKVCache.from_state((k_1GND, v_1GND, length, 0, window, k_1GND.shape[2]))
    return KVCache.from_state((k_1GND, v_1GND, length))


class Batch:
    def __init__(self, rows: list[Row], caches: list[Any]) -> None:
        self.rows = rows
        self.caches = caches
        """Per layer."""

    def forward(self, model: Any, token_BT: list[list[int]]) -> mx.array:
        """Logits [B, T, V]; computed when they or the caches are evaluated."""
        logits_BTV = model(mx.array(token_BT), cache=self.caches)
        for row in self.rows:
            row.length += len(token_BT[0])
        return logits_BTV

    def arrays(self) -> list[mx.array]:
        return [array for cache in self.caches if cache.keys is not None for array in (cache.keys, cache.values)]

    @property
    def num_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def last(self, layer_id: int, row: Row, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values [G, N, D] of the row's last `count` tokens, fewer where a window has let them go."""
        cache, index = self.caches[layer_id], self.rows.index(row)
        if isinstance(cache, BatchRotatingKVCache):
            cache = cache.extract(index)
        if isinstance(cache, RotatingKVCache):
            k_GND, v_GND = _in_order(cache)
        else:
            end = cache.size()
            k_GND, v_GND = cache.keys[index, :, :end], cache.values[index, :, :end]
        return k_GND[:, -count:], v_GND[:, -count:]

    def trim(self) -> None:
        """Layers with a window forget what a chunk longer than it left with them."""
        for layer_id, cache in enumerate(self.caches):
            if isinstance(cache, RotatingKVCache) and cache.keys is not None and cache.keys.shape[2] > cache.max_size:
                self.caches[layer_id] = BatchRotatingKVCache.merge([cache]).extract(0)

    def keep(self, rows: Set[Row]) -> None:
        """The others leave; some stay."""
        kept = [index for index, row in enumerate(self.rows) if row in rows]
        if len(kept) == len(self.rows):
            return
        if len(kept) == 1:
            self.caches = [cache.extract(kept[0]) for cache in self.caches]
        else:
            for cache in self.caches:
                cache.filter(mx.array(kept))
        self.rows = [self.rows[index] for index in kept]

    def split(self, rows: Set[Row]) -> Batch:
        """Some rows, not all, go into a batch of their own."""
        going = [index for index, row in enumerate(self.rows) if row in rows]
        parts = [Batch([self.rows[index]], [cache.extract(index) for cache in self.caches]) for index in going]
        self.keep(set(self.rows) - rows)
        return merge(parts)

    def check(self) -> None:
        for cache in self.caches:
            offsets = [cache.offset] if len(self.rows) == 1 else cache.offset.tolist()
            assert offsets == [row.length for row in self.rows], f"{offsets} in {type(cache).__name__}"


def _in_order(cache: Any) -> tuple[mx.array, mx.array]:
    """What a window's cache of one row holds, oldest token first. After a chunk that may be more than the window."""
    keys, values, offset, _, _, place = cache.state
    if place < keys.shape[2] <= offset:  # a full ring, the oldest where the next one goes
        return mx.roll(keys[0], -place, axis=1), mx.roll(values[0], -place, axis=1)
    return keys[0, :, :place], values[0, :, :place]


def merge(batches: list[Batch]) -> Batch:
    """One batch of all rows. The old ones are used up."""
    if len(batches) == 1:
        return batches[0]
    alone = [batch for batch in batches if len(batch.rows) == 1]
    parts = [batch for batch in batches if len(batch.rows) > 1]
    if alone:
        caches = [type(layer[0]).merge(layer) for layer in zip(*(batch.caches for batch in alone))]
        parts.append(Batch([batch.rows[0] for batch in alone], caches))
    first, *others = parts
    for other in others:
        for cache, more in zip(first.caches, other.caches, strict=True):
            cache.extend(more)
        first.rows = first.rows + other.rows
    return first
