"""A tokenizer's special tokens as text: where a text spells them, and how it is encoded where they are not tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from itertools import groupby

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

Spans = Sequence[tuple[int, int]]


class SpecialText:
    """The library has one switch for a whole text. Here a second tokenizer, which shares the first one's model, has the
    special tokens under random names; those that are meant as tokens are renamed before it runs.
    """

    def __init__(self, backend: Backend) -> None:
        added = sorted(backend.get_added_tokens_decoder().items())
        is_plain = backend.encode_special_tokens  # then no text spells a special token
        special = [token.content for _, token in added if token.special and not is_plain]
        self._names = {token: f"\U00100000{secrets.token_hex(8)}\U00100000" for token in special}
        """Special token → its name in the second tokenizer."""
        self.pattern = re.compile(_either(self._names) if self._names else "(?!)")
        """Matches the longest special token that begins at a place."""
        self._ids = {self._names.get(token.content, token.content): token_id for token_id, token in added}
        """By the second tokenizer's names."""
        self._model = backend.model
        self._unknown: str | None = getattr(self._model, "unk_token", None)
        self._backend = Backend(self._model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            setattr(self._backend, part, getattr(backend, part))
        self._backend.add_tokens([self._renamed(token) for _, token in added])

    def _renamed(self, token: AddedToken) -> AddedToken:
        flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        return AddedToken(self._names.get(token.content, token.content), special=False, **flags)

    def find(self, texts: Sequence[str]) -> list[str]:
        """Special tokens that any of the texts spells."""
        return sorted({token for text in texts for token in self.pattern.findall(text)})

    def arises(self, texts: Sequence[str]) -> bool:
        """Whether texts spell a special token together, written one after the other, trimmed or not."""
        alone = [token for text in texts for token in self.pattern.findall(text)]
        return any(self.pattern.findall(whole) != alone for whole in ("".join(texts), "".join(map(str.strip, texts))))

    def encode(self, text: str, add_special_tokens: bool, plain: Spans) -> list[int]:
        """The tokens of a text in which special tokens are text within `plain` and tokens everywhere else."""
        pieces: list[str] = []
        spelled = {text[begin:end] for begin, end in plain}
        at = 0
        for begin, end in [*plain, (len(text), len(text))]:
            pieces += [self.pattern.sub(lambda found: self._names[found[0]], text[at:begin]), text[begin:end]]
            at = end
        (encoding,) = self._backend.encode_batch(["".join(pieces)], add_special_tokens=add_special_tokens)
        ids: list[int] = []
        for token_id, token, around in zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, strict=True):
            if around:  # a bos or an eos, with its own id
                ids.append(token_id)
            elif token in spelled and token != self._unknown:
                # A model of whole words may know the text as one of its words.
                ids += [piece.id for character in token for piece in self._model.tokenize(character)]
            else:
                ids.append(self._ids.get(token, token_id))
        return ids


def _either(words: Collection[str]) -> str:
    """A pattern for the longest of the words that matches: their common prefixes are tried once."""
    by_first = groupby(sorted(filter(None, words)), lambda word: word[0])
    branches = [re.escape(first) + _either([word[1:] for word in group]) for first, group in by_first]
    if len(branches) == 1 and "" not in words:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if '' in words else ''}" if branches else ""
