"""Text to tokens and back, through the `tokenizers` library and the model folder's tokenizer.json alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend


class Tokenizer:
    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{path}: not found; text needs a tokenizer.json in the model folder")
        try:
            self.backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for anything it cannot read
            raise ValueError(f"{path}: not a readable tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.backend.decode(list(tokens))
        return text

    def stream(self) -> TextStream:
        return TextStream(self)


class TextStream:
    """Tokens in, text out, never half a character: what is not yet certain waits."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.begin = 0
        """Tokens before this one are out and no longer needed as context."""
        self.done = 0
        """Tokens before this one are out."""

    def add(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self.tokens.append(token)
        return self._take(finished=False)

    def rest(self) -> str:
        """What still waits, however incomplete."""
        return self._take(finished=True)

    def _take(self, finished: bool) -> str:
        # Decoded with the tokens before them, because a decoder may treat the first token of a text differently.
        before = self.tokenizer.decode(self.tokens[self.begin : self.done])
        now = self.tokenizer.decode(self.tokens[self.begin :])
        if not finished and (now.endswith("�") or len(now) <= len(before)):
            return ""
        self.begin, self.done = self.done, len(self.tokens)
        return now[len(before) :]
