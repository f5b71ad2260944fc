"""Special tokens that users spell out in a chat, such as <|im_end|>, are text; only the template's own are tokens.

A rendered chat does not show who wrote which part. So special-token text in messages, tools and template variables is
replaced by single characters before the template runs (`render_chat`) and put back afterwards, with its positions. A
chat without such text is rendered and encoded as it is, exactly as transformers does it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

if TYPE_CHECKING:
    from anabranch.text.chat_template import ChatTemplate
    from anabranch.text.tokenizer import Tokenizer

Spans = Sequence[tuple[int, int]]
MARKS = range(0xF0000, 0xFFFFE)
"""Characters without a meaning: a private-use plane of Unicode. Templates trim, split and cut at none of them."""
MAX_DEPTH = 400
"""Lists and objects within each other. Templates and JSON filters recurse over them."""


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    plain: Spans = ()
    """[begin, end) of text that spells a special token but is text."""


def render_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    /,
    messages: Any,
    tools: Any = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> Rendered:
    """A chat as `template` writes it. Encode it with `tokenizer.encode(text, False, plain)`."""
    special = tokenizer.special_text
    try:
        strings = list(_strings((messages, tools, variables)))
        tokens = special.find(strings)
        if not tokens:
            return Rendered(template.render(messages, tools, add_generation_prompt, **variables))
        everything = "\n".join([*strings, *template.sources.values()])
        taken = {*everything}
        free = (mark for mark in map(chr, MARKS) if mark not in taken and json.dumps(mark)[1:-1] not in everything)
        marks = dict(zip(tokens, free, strict=False))
        sought = {token for token in tokens if any(token in text for text in template.sought)}

        def replace(value: Any, kept: Collection[str] = ()) -> Any:
            """A copy in which marks replace the tokens in all strings, except tokens in `kept`."""
            if isinstance(value, str):
                return special.pattern.sub(lambda found: found[0] if found[0] in kept else marks[found[0]], value)
            if isinstance(value, Mapping):
                return {replace(name, kept): replace(inner, kept) for name, inner in value.items()}
            return [replace(inner, kept) for inner in value] if isinstance(value, list | tuple) else value

        given = messages
        messages, tools, variables = replace(messages), replace(tools), replace(variables)
        if sought and isinstance(messages, list):
            for message, old in zip(messages, given, strict=True):
                if isinstance(message, dict) and message.get("role") == "assistant" and "content" in message:
                    # A template takes thoughts out of earlier answers by their tags, and must find them.
                    message["content"] = replace(old["content"], sought)
    except RecursionError:
        raise ValueError("the messages are nested too deeply, or contain themselves") from None
    return _unmark(template.render(messages, tools, add_generation_prompt, **variables), marks)


def _strings(value: Any) -> Iterator[str]:
    """All strings within a value, names of members too. Without recursion: the cost does not grow with the depth."""
    todo = [(value, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list | tuple):
            if depth == MAX_DEPTH:
                raise RecursionError
            parts = (*value, *value.values()) if isinstance(value, Mapping) else value
            todo += [(part, depth + 1) for part in parts]


def _unmark(text: str, marks: Mapping[str, str]) -> Rendered:
    """Replaces marks by the text they stand for, as JSON escapes where the template has escaped them."""
    spelled = {mark: token for token, mark in marks.items()}
    spelled |= {json.dumps(mark)[1:-1]: json.dumps(token)[1:-1] for token, mark in marks.items()}
    pieces: list[str] = []
    plain: list[tuple[int, int]] = []
    length = 0
    for number, piece in enumerate(re.split(f"({'|'.join(map(re.escape, spelled))})", text)):
        if number % 2:
            piece = spelled[piece]
            plain.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    return Rendered("".join(pieces), plain)


class SpecialText:
    """A tokenizer's special tokens as text: where a text spells them, and how it is encoded where they are not tokens.

    The library has one switch for a whole text. Here a second tokenizer, which shares the first one's model, has the
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
