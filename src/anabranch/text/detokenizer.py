"""One sequence's tokens to its text, piece by piece: whole characters only, and cut at the first stop string.

Knows nothing of requests: which tokens belong to the text (an end-of-text token usually does not) is for the caller to
say.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.sampling_params import SamplingParams
from anabranch.text.tokenizer import Tokenizer


class Detokenizer:
    """The pieces that `add` and `finish` return, joined, are the text of all tokens decoded at once, cut at the first
    stop string; how tokens are shared out over calls makes no difference.

    Of several stop strings in a text the first is the one that ends first, and of those that end together the longest.
    As long as some of the text may still become a stop string it is held back. With `min_tokens`, a stop string that
    the first so many tokens complete is part of the text.

    With `continues` the text goes on after its prompt and keeps the space it begins with (see TextStream).
    """

    __slots__ = (
        "_first_characters",
        "_held",
        "_longest",
        "_params",
        "_stream",
        "num_tokens",
        "shows_stop_token",
        "stopped",
    )

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, continues: bool = False) -> None:
        self.num_tokens = 0
        """Tokens used: up to the one that completed a stop string."""
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self.shows_stop_token = params.include_stop_str_in_output
        """Whether a token that ends the sequence belongs to its text and is to be added."""
        self._params = params
        self._stream = tokenizer.stream(params.skip_special_tokens, continues)
        self._held = ""
        self._first_characters = frozenset(stop[0] for stop in params.stop)
        self._longest = max(map(len, params.stop), default=0)

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that became certain; after a stop string tokens are ignored."""
        if not self._params.stop:
            self.num_tokens += len(token_ids)
            return self._stream.extend(token_ids)
        pieces = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            pieces.append(self._release(self._stream.add(token_id)))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back. Nothing may be added after it."""
        if self.stopped is not None:
            return ""
        text = self._release(self._stream.rest())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def check(self) -> None:
        assert len(self._stream.waiting) < 4, self._stream.waiting
        assert not (self.stopped and self._held), (self.stopped, self._held)
        assert not self._held or any(s.startswith(self._held) and s != self._held for s in self._params.stop)

    def _release(self, new: str) -> str:
        """New text comes in, the text before any stop string, finished or possible, goes out."""
        if not self._held and self._first_characters.isdisjoint(new):  # as most text is
            return new
        text = self._held + new
        if self.num_tokens > self._params.min_tokens:
            end, begin = self._find_stop(text)
            if end:
                self.stopped, self._held = text[begin:end], ""
                return text[: end if self._params.include_stop_str_in_output else begin]
        split = self._find_possible_stop(text)
        self._held = text[split:]
        return text[:split]

    def _find_stop(self, text: str) -> tuple[int, int]:
        """End and begin of the first stop string that ends in new text; (0, 0) if none does."""
        found = (0, 0)
        for stop in self._params.stop:
            begin = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if begin >= 0 and (not found[0] or (begin + len(stop), begin) < found):
                found = begin + len(stop), begin
        return found

    def _find_possible_stop(self, text: str) -> int:
        """Where the longest end of the text begins that is the beginning of a stop string."""
        for position in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_characters:
                tail = text[position:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._params.stop):
                    return position
        return len(text)
