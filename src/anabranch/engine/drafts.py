"""Where drafts come from: guesses of a request's next tokens, several of which one step then verifies.

A draft costs a token row of a step and changes no answer: what a row samples counts only if the drafts before it are
what the rows before it sampled. Plain ints.
"""

from collections.abc import Sequence
from typing import Protocol

LONGEST = 4
"""Tokens that must agree with an earlier place, if possible; or three, or two."""


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
        self.next_place = LONGEST
        """The first place that is not in `after`."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        after, length = self.after, len(tokens)
        for place in range(self.next_place, length):
            ngram = tuple(tokens[place - LONGEST : place])
            after[ngram] = after[ngram[1:]] = after[ngram[2:]] = place
        self.next_place = max(LONGEST, length)
        last = tuple(tokens[-LONGEST:])
        for ngram, count in ((last, most), (last[1:], 2), (last[2:], 1)):
            found = after.get(ngram)
            if found is not None:
                drafts, period = list(tokens[found : found + min(count, most)]), length - found
                while len(drafts) < min(count, most):
                    drafts.append(drafts[-period])
                return drafts
        return []


class StepDrafter:
    """What the step that sampled the last token has drafted after it (models/mtp)."""

    def __init__(self) -> None:
        self.drafts: list[int] = []
        """After the last known token; set when that is read."""

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        drafts, self.drafts = self.drafts, []
        return drafts[:most]
