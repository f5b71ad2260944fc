"""Special tokens that users spell out in a chat, such as <|im_end|>: they are text, and the template's own are tokens.

A rendered chat does not show who wrote what. So special-token text in messages, tools and template variables is
replaced by single characters before the template runs (`render_chat`) and put back afterwards, and where it stood is
remembered. A chat without such text is rendered and encoded as it is, exactly as transformers does it.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

if TYPE_CHECKING:
    from anabranch.text.chat_template import ChatTemplate
    from anabranch.text.tokenizer import Tokenizer

Spans = Sequence[tuple[int, int]]
MARKS = range(0xF0000, 0xFFFFE)
"""Characters without a meaning: a private-use plane of Unicode. Templates trim, split and cut at none of them."""
DEEPEST = 400
"""Lists and objects within each other. Templates and JSON filters walk them by recursion."""


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    plain: Spans = ()
    """[begin, end) of text that spells a special token and is none."""


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
            text = template.render(messages, tools, add_generation_prompt, **variables)
            return Rendered(text)
        everything = "\n".join([*strings, *template.sources.values()])
        taken = {*everything}
        free = (mark for mark in map(chr, MARKS) if mark not in taken and json.dumps(mark)[1:-1] not in everything)
        marks = dict(zip(tokens, free, strict=False))
        sought = {token for token in tokens if any(token in text for text in template.sought)}

        def replace(text: str) -> str:
            return special.pattern.sub(lambda found: marks[found[0]], text)

        def replace_but_sought(text: str) -> str:
            return special.pattern.sub(lambda found: found[0] if found[0] in sought else marks[found[0]], text)

        def message(value: Any) -> Any:
            new = _map(replace, value)
            if sought and isinstance(new, dict) and new.get("role") == "assistant" and "content" in new:
                # A template takes thoughts out of earlier answers by their tags, and must find them.
                new["content"] = _map(replace_but_sought, value["content"])
            return new

        messages = [*map(message, messages)] if isinstance(messages, list | tuple) else _map(replace, messages)
        tools, variables = _map(replace, tools), _map(replace, variables)
    except RecursionError:
        raise ValueError("the messages are nested too deeply, or contain themselves") from None
    return _unmark(template.render(messages, tools, add_generation_prompt, **variables), marks)


def _strings(value: Any) -> Iterator[str]:
    """All strings within a value, names of members too. Without recursion: its cost does not grow with the depth."""
    todo = [(value, 0)]
    while todo:
        value, depth = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping | list | tuple):
            if depth == DEEPEST:
                raise RecursionError
            parts = (*value, *value.values()) if isinstance(value, Mapping) else value
            todo += [(part, depth + 1) for part in parts]


def _map(change: Callable[[str], str], value: Any) -> Any:
    """A copy with every string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(change, name): _map(change, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map(change, inner) for inner in value]
    return value


def _unmark(text: str, marks: Mapping[str, str]) -> Rendered:
    """Marks become the text they stand for; as JSON escapes, if a template has written them so."""
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
    """A tokenizer's special tokens as text: where a text spells them, and how it is encoded where they are none.

    The library knows one switch for a whole text. Here a second tokenizer, which shares the first one's model, knows
    special tokens under other names, which nobody can guess; those that are meant are renamed before it runs.
    """

    def __init__(self, backend: Backend) -> None:
        added = sorted(backend.get_added_tokens_decoder().items())
        is_plain = backend.encode_special_tokens  # then no text spells any
        self._names = {token.content: _name() for _, token in added if token.special and not is_plain}
        """Special token → its name in the second tokenizer."""
        self.pattern = re.compile(_either(self._names) if self._names else "(?!)")
        """The longest special token that begins at a place."""
        self._ids = {self._names.get(token.content, token.content): token_id for token_id, token in added}
        """Of tokens as the second tokenizer names them."""
        self._model = backend.model
        self._unknown: str | None = getattr(self._model, "unk_token", None)
        self._backend = Backend(self._model)
        self._backend.normalizer = backend.normalizer
        self._backend.pre_tokenizer = backend.pre_tokenizer
        self._backend.post_processor = backend.post_processor
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
        spelled: set[str] = set()
        at = 0
        for begin, end in plain:
            pieces += [self._rename(text[at:begin]), text[begin:end]]
            spelled.add(text[begin:end])
            at = end
        pieces.append(self._rename(text[at:]))
        (encoding,) = self._backend.encode_batch(["".join(pieces)], add_special_tokens=add_special_tokens)
        ids: list[int] = []
        for token_id, token, around in zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, strict=True):
            if around:  # a bos or an eos, by its own id
                ids.append(token_id)
            elif token in spelled and token != self._unknown:
                # A model of whole words may know the text as one of its words.
                ids += [piece.id for character in token for piece in self._model.tokenize(character)]
            else:
                ids.append(self._ids.get(token, token_id))
        return ids

    def _rename(self, text: str) -> str:
        return self.pattern.sub(lambda found: self._names[found[0]], text)


def _name() -> str:
    return f"\U00100000{secrets.token_hex(8)}\U00100000"


def _either(words: Mapping[str, object]) -> str:
    """A pattern for the longest of the words that fits: their common beginnings are tried once."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def write(node: dict[str, Any]) -> str:
        branches = [re.escape(character) + write(inner) for character, inner in node.items() if character]
        if not branches:
            return ""
        if len(branches) == 1 and "" not in node:
            return branches[0]
        return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"

    return write(root)
