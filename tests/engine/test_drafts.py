"""Drafts from n-grams: what a naive search finds, with work for new tokens alone."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from anabranch.engine.drafts import LONGEST, NgramDrafter


def naive(tokens: Sequence[int], most: int) -> list[int]:
    """By the definition: the latest earlier place after the last n tokens, and from there on as if it repeated."""
    for n in (4, 3, 2):
        last = tokens[-n:]
        for place in range(len(tokens) - 1, LONGEST - 1, -1):
            if tokens[place - n : place] == last:
                endless = list(tokens[place:])
                while len(endless) < most:
                    endless += endless
                return endless[: most if n == LONGEST else min(most, n - 1)]
    return []


def test_examples() -> None:
    assert NgramDrafter().propose([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 3) == [5, 6, 1]
    assert NgramDrafter().propose([1, 2, 3, 4, 5, 6, 2, 3, 4], 3) == [5, 6], "three tokens agree"
    assert NgramDrafter().propose([1, 2, 3, 4, 5, 6, 3, 4], 3) == [5], "two tokens agree"
    assert NgramDrafter().propose([9, 1, 2, 3, 1, 2, 4, 1, 2], 1) == [4], "the latest"
    assert NgramDrafter().propose([0, 9, 1, 2, 3, 8, 1, 2, 5, 9, 1, 2], 1) == [3], "the longest"
    assert NgramDrafter().propose([1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2], "as if it repeated"
    assert NgramDrafter().propose([5, 5, 5, 5, 5], 3) == [5, 5, 5]
    assert NgramDrafter().propose([5, 5, 5, 5, 5], 1) == [5]
    for tokens in ([1], [1, 2], [1, 2, 3], [1, 1, 2], [1, 2, 3, 4, 5]):
        assert NgramDrafter().propose(tokens, 4) == []


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 9])
def test_indexed_is_naive(num_kinds: int) -> None:
    rng = random.Random(num_kinds)
    for _ in range(20):
        drafter, tokens = NgramDrafter(), [rng.randrange(num_kinds) for _ in range(rng.randrange(1, 12))]
        while len(tokens) < 120:
            most = rng.randrange(1, 9)
            assert drafter.propose(tokens, most) == naive(tokens, most)
            tokens += [rng.randrange(num_kinds) for _ in range(rng.randrange(1, 6))]


class Counted(list[int]):
    """Counts the elements that are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(found, list) else 1
        return found


def test_a_step_reads_a_few_tokens_however_many_there_are() -> None:
    rng = random.Random(0)
    tokens, drafter = Counted(rng.randrange(50) for _ in range(5000)), NgramDrafter()
    drafter.propose(tokens, 4)
    for _ in range(200):
        tokens.append(rng.randrange(50))
        tokens.num_read = 0
        drafter.propose(tokens, 4)
        assert tokens.num_read < 25
