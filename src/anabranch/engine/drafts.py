"""Where drafts come from: guesses of a request's next tokens, several of which one step then verifies.

A draft costs a token row of a step and changes no answer: what a row samples counts only if the drafts before it are
what the rows before it sampled. Plain ints.
"""

from collections.abc import Sequence
from typing import Protocol

LENGTHS = (4, 3, 2)
"""Tokens that must agree with an earlier place; the longest first."""


class Drafter(Protocol):
    """Guesses for one request."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow these: prompt and answer, all of them known. A later call has the same
        tokens and more."""


class NgramDrafter:
    """What followed the latest earlier occurrence of the last few tokens; where that is too short, as if it repeated.
    The fewer tokens agree, the fewer drafts: one after two that agree, two after three. The time of a call depends on
    the new tokens alone."""

    def __init__(self) -> None:
        self.after: dict[tuple[int, ...], int] = {}
        """The tokens of an n-gram → the place after its latest occurrence, where a token is known."""
        self.num_indexed = 0
        """Places up to here are in `after`."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        length = len(tokens)
        for n in LENGTHS:
            if length > n:
                first = max(0, self.num_indexed + 1 - n)
                ngrams = zip(*(tokens[first + i : length - n + i] for i in range(n)))
                self.after.update(zip(ngrams, range(first + n, length)))
        self.num_indexed = length - 1
        for n in LENGTHS:
            place = self.after.get(tuple(tokens[-n:]))
            if place is not None:
                count, period = most if n == LENGTHS[0] else min(most, n - 1), length - place
                drafts = list(tokens[place : place + count])
                while len(drafts) < count:
                    drafts.append(drafts[-period])
                return drafts
        return []
