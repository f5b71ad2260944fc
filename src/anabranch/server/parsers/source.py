"""Text that arrives in pieces, read as if it were all there.

Parsers are generators over a Source: they yield where they need more text, and continue when it has come. Each step
decides by characters that are there, or by the end of the text, never by where a piece ended: so every way to cut the
text gives the same result.

What was read is held until the parser knows what it was: `release` returns it, `drop` discards it as notation. The
text that is neither read nor held is never longer than the longest tag, so the cost of a piece is linear in its length.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]
"""The type of a parser that may have to wait for text, and returns a T."""

SPACE = re.compile(r"\s+")


class Tags:
    """Texts to look for; an empty one is none. None of them begins another."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts = tuple(filter(None, texts))
        begun = {re.escape(text[:length]) for text in texts for length in range(1, len(text))}
        whole = f"({'|'.join(map(re.escape, texts)) or '(?!)'})"
        self.whole = re.compile(whole)
        self.whole_or_begun = re.compile(rf"{whole}|(?:{'|'.join(sorted(begun)) or '(?!)'})\Z")


class Source:
    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        """How much of `_text` is read."""
        self._held: list[str] = []
        self.is_blank = True
        """Only white space is held."""
        self.num_added = self.num_used = 0
        """Characters; used are those released or dropped."""

    def add(self, text: str, final: bool) -> None:
        assert not self.ended or not text, "text after the final piece"
        self._text = self._text[self._at :] + text
        self._at = 0
        self.num_added += len(text)
        self.ended = self.ended or final

    def peek(self) -> Wait[str]:
        """The next character; empty at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, length: int) -> str:
        """Read `length` characters, which must be there."""
        piece = self._text[self._at : self._at + length]
        assert len(piece) == length
        self._at += length
        self._held.append(piece)
        self.is_blank = self.is_blank and piece.isspace()
        return piece

    def skip(self, length: int) -> None:
        """Read `length` characters, and drop them and all that is held."""
        self.take(length)
        self.drop()

    def at(self, text: str) -> Wait[bool]:
        """Whether this text comes next."""
        while not self.ended and len(self._text) - self._at < len(text) and text.startswith(self._text[self._at :]):
            yield
        return self._text.startswith(text, self._at)

    def literal(self, text: str) -> Wait[bool]:
        """Read this text if it comes next; otherwise read nothing."""
        if not (yield from self.at(text)):
            return False
        self.take(len(text))
        return True

    def spaced(self, text: str) -> Wait[bool]:
        """Read white space, and this text if it comes next."""
        yield from self.space()
        return (yield from self.literal(text))

    def run(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Read as much as the pattern matches; it matches one or more characters of a class."""
        pieces = []
        while (yield from self.peek()) and (match := pattern.match(self._text, self._at)):
            pieces.append(self.take(match.end() - match.start()))
        return "".join(pieces)

    def space(self) -> Wait[str]:
        return (yield from self.run(SPACE))

    def until(self, tags: Tags, put: Callable[[str], object] = lambda piece: None) -> Wait[str]:
        """Read the text before the next of the tags, and call `put` with each piece of it as it comes. Returns the tag,
        which is not read; empty at the end."""
        while True:
            pattern = tags.whole if self.ended else tags.whole_or_begun
            match = pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if end > self._at:
                put(self.take(end - self._at))
            if self.ended or (match and match[1]):
                return match[1] if match else ""
            yield

    def text_until(self, tags: Tags) -> Wait[tuple[str, str]]:
        """All of the text before the next of the tags, and the tag."""
        pieces = list[str]()
        tag = yield from self.until(tags, pieces.append)
        return "".join(pieces), tag

    def release(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        self.is_blank = True
        self.num_used += len(text)
        return text

    def drop(self) -> None:
        self.release()

    def settle(self, emit: Callable[[str], None]) -> None:
        """Emit what is held as text; white space at its end stays held until it is known what follows."""
        if self.is_blank:
            return
        text = self.release()
        body = text.rstrip()
        emit(body)
        if len(body) < len(text):
            self._held.append(text[len(body) :])
            self.num_used -= len(text) - len(body)

    def unread(self) -> None:
        """Put back what is held, to be read again: at the end only, otherwise text could be read many times."""
        assert self.ended
        self.put_back(self.release())

    def put_back(self, text: str) -> None:
        """Text that was released last, to be read again; the caller sees to it that none comes back many times."""
        assert not self._held
        self._text = text + self._text[self._at :]
        self._at = 0
        self.num_used -= len(text)

    def check(self) -> None:
        held = sum(map(len, self._held))
        unread = len(self._text) - self._at
        assert self.num_added == self.num_used + held + unread
        assert not self.ended or unread == 0 or held == 0
