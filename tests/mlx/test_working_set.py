"""Random walks of rows that join, compute, leave, make room and come back: each sees its own tokens and no others.

The model is a toy whose keys are the tokens themselves, so that what a query may look at can be read off. Its first
layer sees everything, its second a window. The caches are mlx_lm's, the pages ours.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("mlx_lm", reason="needs an environment of its own: make test-mlx")

import mlx.core as mx
import numpy as np

from anabranch.layers.cache import CacheGroup, CacheSpec, KeepAll, KeepWindow
from anabranch.mlx import memory
from anabranch.mlx.kv_cache import Batch, Row
from anabranch.mlx.working_set import Pool, WorkingSet

PAGE, WINDOW = 4, 6
MODEL: Any = SimpleNamespace(
    cache_groups=tuple(
        CacheGroup((layer_id,), CacheSpec(((1, 1), (1, 1)), policy))
        for layer_id, policy in enumerate((KeepAll(), KeepWindow(WINDOW)))
    ),
    layers=(None, None),
)
COST = partial(memory.working_bytes, MODEL, "float32")


class Toy:
    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []
        """[layer][row]: the tokens that the last query of the last call may look at."""

    def __call__(self, token_BT: mx.array, cache: list[Any]) -> mx.array:
        rows, count = token_BT.shape
        self.seen = []
        for layer in cache:
            mask = layer.make_mask(count, return_array=True, window_size=None)
            k_B1T1 = token_BT.astype(mx.float32)[:, None, :, None]
            keys = np.array(layer.update_and_fetch(k_B1T1, k_B1T1)[0])[:, 0, :, 0]
            visible = np.ones_like(keys, bool)
            if mask is not None:
                visible = np.broadcast_to(np.array(mask), (rows, 1, count, keys.shape[1]))[:, 0, -1]
            self.seen.append([sorted(map(int, keys[row][visible[row]])) for row in range(rows)])
        return mx.zeros((rows, count, 1))


class Walk:
    def __init__(self, room: int, share: bool) -> None:
        self.toy = Toy()
        self.working = WorkingSet(Pool(MODEL, [3000, 3000], PAGE, mx.float32), [0, WINDOW], room, COST, share)
        self.share = share
        self.rows: dict[Row, list[int]] = {}
        """And their tokens."""
        self.next_token, self.next_page = 1, 0

    def join(self, choice: int) -> None:
        """A row of its own, or with some whole pages of another one's beginning."""
        tables: list[list[int]] = [[], []]
        known: list[int] = []
        if self.share and self.rows and choice % 3:
            other = list(self.rows)[choice % len(self.rows)]
            pages = other.length // PAGE
            pages -= choice % 2 if pages else 0
            tables, known = [table[:pages] for table in other.tables], self.rows[other][: pages * PAGE]
        sequence: Any = SimpleNamespace(id=str(len(self.rows)))
        self.rows[Row(sequence, 0, tables, length=len(known), saved=len(known))] = list(known)

    def compute(self, rows: list[Row], count: int) -> None:
        for row in rows:
            while len(row.tables[0]) * PAGE < row.length + count:
                for table in row.tables:
                    table.append(self.next_page)
                self.next_page += 1
        batch = self.working.assemble(rows, count)
        assert set(batch.rows) == set(rows) and len(batch.rows) == len(rows)
        new = [list(range(self.next_token + i * count, self.next_token + (i + 1) * count)) for i in range(len(rows))]
        self.next_token += len(rows) * count
        batch.forward(self.toy, new)
        for index, row in enumerate(batch.rows):
            self.rows[row] += new[index]
            assert self.toy.seen[0][index] == self.rows[row]
            assert self.toy.seen[1][index] == self.rows[row][-WINDOW:]
            assert row.length == len(self.rows[row])
        self.working.save(batch)
        if len(rows) == 1:
            batch.trim()
        self.working.check()
        if not self.share:  # pages behind the window go to others; 0 stands for them, and is a page too
            for row in rows:
                behind = KeepWindow(WINDOW).first_page(row.length, PAGE)
                row.tables[1][:behind] = [0] * behind

    def decode(self, choice: int) -> None:
        """One token for most rows; some have no share in the step."""
        running = [row for index, row in enumerate(self.rows) if (choice >> index % 5) & 1 or choice % 2]
        for group in self.working.groups(running):
            self.compute(group, 1)
        together = sum(COST([row.length for row in batch.rows]) for batch in self.working.batches)
        assert together <= self.working.room or len(self.working.batches) == 1

    def leave(self, choice: int) -> None:
        going = [row for index, row in enumerate(self.rows) if (choice + index) % 3 == 0]
        self.working.leave(going)
        for row in going:
            del self.rows[row]
        assert {row for batch in self.working.batches for row in batch.rows} <= set(self.rows)


STEPS = st.lists(
    st.tuples(st.sampled_from("jjpddddl"), st.integers(0, 31), st.integers(1, 23)), min_size=4, max_size=24
)


@settings(max_examples=150)
@given(steps=STEPS, width=st.integers(1, 6), share=st.booleans())
def test_rows_see_their_own_tokens(steps: list[tuple[str, int, int]], width: int, share: bool) -> None:
    walk = Walk(room=COST([60] * width), share=share)
    for kind, choice, count in steps:
        if kind == "j" and len(walk.rows) < 7:
            walk.join(choice)
        elif kind == "p" and walk.rows:
            row = list(walk.rows)[choice % len(walk.rows)]
            if row.length < 59:
                walk.compute([row], min(count, 59 - row.length))
        elif kind == "d":
            walk.decode(choice)
        elif kind == "l":
            walk.leave(choice)
        walk.working.check()


def test_what_does_not_fit_takes_turns() -> None:
    walk = Walk(room=COST([40]) + COST([10]), share=False)
    for index in range(4):
        walk.join(0)
        walk.compute([list(walk.rows)[index]], (39, 9, 8, 20)[index])
    for _ in range(5):
        walk.decode(1)
    assert walk.working.num_parked > 4
    assert all(0 in row.tables[1] for row in walk.rows)
    assert [len(tokens) for tokens in walk.rows.values()] == [44, 14, 13, 25]


def test_pages_that_were_given_back_are_not_written() -> None:
    """The first row lives in page 0, which also stands for pages that the second one has given back: those up to its
    token 27, the oldest that the ring still holds when it makes room."""
    walk = Walk(room=COST([60]), share=False)
    for count in (5, 32):
        walk.join(0)
        walk.compute([list(walk.rows)[-1]], count)
    walk.decode(1)  # first the second one, which is longer; then it makes room for the first
    assert walk.working.num_parked == 2 and list(walk.rows)[1].tables[1][6:8] == [0, 9]


def test_rows_that_fit_stay_where_they_are() -> None:
    """No copies: a step over the same rows finds the same batch, and nobody is parked."""
    walk = Walk(room=COST([40] * 4), share=True)
    for index in range(4):
        walk.join(0)
        walk.compute([list(walk.rows)[index]], 5 + index)
    walk.decode(1)
    (batch,) = walk.working.batches
    for _ in range(9):
        walk.decode(1)
        assert walk.working.batches == [batch]
    assert walk.working.num_parked == 0


def test_a_window_forgets_a_chunk_longer_than_itself() -> None:
    walk = Walk(room=COST([2000]), share=True)
    walk.join(0)
    (row,) = walk.rows
    walk.compute([row], 1200)
    assert walk.working.batches[0].caches[1].nbytes == 2 * WINDOW * 4
    walk.compute([row], 1)
    walk.join(1)  # with the first one's pages, which the window has long left
    walk.compute([list(walk.rows)[1]], 3)


def test_the_longer_half_runs_apart() -> None:
    walk = Walk(room=COST([10] * 2), share=False)
    for length in (3, 50, 10, 40):
        walk.join(0)
        list(walk.rows)[-1].length = length
    groups = walk.working.groups(list(walk.rows))
    assert [[row.length for row in group] for group in groups] == [[50], [40], [10, 3]]


def test_a_check_sees_a_row_that_lost_tokens() -> None:
    walk = Walk(room=COST([40]), share=False)
    walk.join(0)
    walk.compute(list(walk.rows), 5)
    (row,) = walk.rows
    row.length += 1
    with pytest.raises(AssertionError, match=r"\[5\] in KVCache"):
        walk.working.check()
    row.length -= 1
    walk.working.batches.append(Batch([row], walk.working.batches[0].caches))
    with pytest.raises(AssertionError, match="a row in two batches"):
        walk.working.check()
