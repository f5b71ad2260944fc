"""Which rows are in which batch, and which are parked because others need the memory.

Pages are saved when they are full, so that other requests find them as a prefix. A row that is parked saves the rest
and is dropped; it is loaded again from its pages.

N tokens, G key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

from anabranch.mlx.kv_cache import Batch, Row, empty_caches, filled_cache, merge
from anabranch.models.config import ModelConfig


class Pool:
    """Keys and values in pages, as engine.kv_cache allocates them. Knows slots, not requests."""

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


class WorkingSet:
    def __init__(
        self, pool: Pool, windows: Sequence[int], room: int, cost: Callable[[Sequence[int]], int], share: bool
    ) -> None:
        """`cost(lengths)`: bytes of a batch of such rows; `room`: bytes for all. `share`: save full pages."""
        self.pool = pool
        self.windows = windows
        self.room = room
        self.cost = cost
        self.share = share
        self.batches: list[Batch] = []
        """Least recently used first."""
        self.num_parked = 0
        """How often a row was parked."""

    def groups(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Rows that run together: all of them, if their batch fits; else the longer half apart from the shorter."""
        rows = sorted(rows, key=lambda row: -row.length)
        if len(rows) <= 1 or self.cost([row.length for row in rows]) <= self.room:
            return [rows] if rows else []
        middle = len(rows) // 2
        return self.groups(rows[:middle]) + self.groups(rows[middle:])

    def assemble(self, rows: Sequence[Row], num_tokens: int = 1) -> Batch:
        """A batch of exactly these rows, with room for `num_tokens` more tokens."""
        wanted = set(rows)
        parts: list[Batch] = []
        for batch in list(self.batches):
            inside = wanted.intersection(batch.rows)
            if len(inside) == len(batch.rows):
                self.batches.remove(batch)
                parts.append(batch)
            elif inside:
                parts.append(batch.split(inside))
            wanted -= inside
        self._make_room(self.cost([row.length + num_tokens - 1 for row in rows]))
        parts += [self._load(row) for row in rows if row in wanted]
        self.batches.append(merge(parts))
        return self.batches[-1]

    def save(self, batch: Batch) -> None:
        """After tokens were computed: save pages that are full now."""
        if self.share:
            for row in batch.rows:
                if row.length // self.pool.page_size > row.saved // self.pool.page_size:
                    self._save(batch, row)

    def leave(self, rows: Iterable[Row]) -> None:
        going = set(rows)
        self.batches = [batch for batch in self.batches if not going.issuperset(batch.rows)]
        for batch in self.batches:
            batch.keep(set(batch.rows) - going)

    def check(self) -> None:
        rows = [row for batch in self.batches for row in batch.rows]
        assert len(set(rows)) == len(rows), "a row in two batches"
        for batch in self.batches:
            batch.check()
            assert batch.num_bytes <= self.cost([row.length for row in batch.rows])
        assert all(row.saved <= row.length for row in rows)

    def _make_room(self, needed: int) -> None:
        """Park the batches used last until `needed` bytes are free. Batches take turns, so these are needed latest."""
        costs = [self.cost([row.length for row in batch.rows]) for batch in self.batches]
        while costs and needed + sum(costs) > self.room:
            batch = self.batches.pop()
            costs.pop()
            self.num_parked += len(batch.rows)
            for row in batch.rows:
                self._save(batch, row)

    def _save(self, batch: Batch, row: Row) -> None:
        if row.saved == row.length:
            return
        for group, table in zip(self.pool.groups, row.tables, strict=True):
            begin, window = row.saved, self.windows[group.layers[0]]
            if window and not self.share:  # what has left the window was not saved, and its pages are given back
                begin = max(begin, row.length - window + 1)
            slots = self.pool.slots(table, begin, row.length)
            for layer_id in group.layers:
                k_GND, v_GND = batch.last(layer_id, row, row.length - begin)
                self.pool.write(layer_id, slots[-k_GND.shape[1] :], k_GND, v_GND)
        row.saved = row.length

    def _load(self, row: Row) -> Batch:
        assert row.saved == row.length, f"{row.length - row.saved} tokens of {row.sequence.id} are nowhere"
        caches = empty_caches(self.windows)
        if row.length:
            for group, table in zip(self.pool.groups, row.tables, strict=True):
                window = self.windows[group.layers[0]]
                # One token more than the next query sees, which the ring drops first: it counts on being full.
                begin = max(0, row.length - window) if window else 0
                slots = self.pool.slots(table, begin, row.length)
                for layer_id in group.layers:
                    caches[layer_id] = filled_cache(window, row.length, *self.pool.read(layer_id, slots))
        return Batch([row], caches)
