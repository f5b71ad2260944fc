"""The model folder's tokenizer: text to tokens, and tokens to text, all at once or token by token.

The `tokenizers` library reads tokenizer.json; the JSON files next to it name the special tokens. Ids and text are those
of transformers, which the tests compare with and which is not needed to run. Stop strings belong to `output`, chats to
`chat_template`.

tokenizer.json alone decides which special tokens go around a text: like transformers 5, we do not read the
`add_bos_token` of tokenizer_config.json, which repeats it or contradicts it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from anabranch.models.keys import read_json
from anabranch.text.special_text import Spans, SpecialText


class Tokenizer:
    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.backend = _load(self.folder / "tokenizer.json")
        config = read_tokenizer_config(self.folder)
        self.special_tokens = named_special_tokens(config)
        """Such as {"eos_token": "</s>"}: what a chat template may name."""
        self.backend.add_tokens(_missing_tokens(self.folder, config, self.backend))
        # A file may ask for both; but a prompt is never cut silently, and the batch pads.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        self.decoding = read_decoding(self.folder, self.backend.decoder)
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max([self.backend.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        """Every id is below it. The model's own vocabulary may be larger: padded with ids that spell nothing."""
        self.spellings = {skip: Spellings(self, skip) for skip in (False, True)}
        """By whether special tokens are skipped."""

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it ("Ġriver", "▁river"), None for an id without one."""
        try:
            token: str | None = self.backend.id_to_token(token_id)
        except (OverflowError, TypeError):
            raise ValueError(f"a token id must be an integer from 0 to 4294967295, not {token_id!r}") from None
        return token

    @cached_property
    def special_text(self) -> SpecialText:
        return SpecialText(self.backend)

    def encode(self, text: str, add_special_tokens: bool = True, plain: Spans = ()) -> list[int]:
        """`add_special_tokens` puts the tokens around the text that the model was trained with (often a bos).

        A chat template writes them itself: pass False for its text. Strings that spell a special token become that
        token either way, but not within `plain`, spans [begin, end) that each spell one. Other threads can run
        meanwhile, however long the text.
        """
        if not isinstance(text, str):
            raise ValueError(f"text must be a str, not {type(text).__name__}")
        try:
            if plain:
                return self.special_text.encode(text, add_special_tokens, plain)
            # The batch call leaves out offsets and releases the interpreter lock; `encode` does neither.
            ids: list[int] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except Exception as error:  # TypeError for text that is not Unicode, plain Exception for everything else
            if (surrogate := re.search("[\ud800-\udfff]", text)) is not None:
                raise ValueError(
                    f"the text is not valid Unicode: character {surrogate.start()} is U+{ord(surrogate[0]):04X}, "
                    f"half of a surrogate pair; send UTF-8, or whole pairs in JSON escapes"
                ) from None
            raise ValueError(f"the tokenizer cannot encode this text: {error}") from None
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once; ids that the tokenizer does not know spell nothing."""
        stream = self.stream(skip_special_tokens)
        return stream.extend(token_ids) + stream.rest()

    def stream(self, skip_special_tokens: bool = True, continues: bool = False) -> TextStream:
        return TextStream(self, skip_special_tokens, continues)


class TextStream:
    """Decodes tokens to whole characters: the bytes of an unfinished one are kept for the next token.

    However the tokens are split into calls, the text is the same. With `continues` the text follows another (its
    prompt) and keeps the space it begins with, which SentencePiece-like tokenizers drop from the beginning of a text.
    """

    __slots__ = ("errors", "first", "num_strip", "spellings", "waiting")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, continues: bool = False) -> None:
        decoding = tokenizer.decoding
        self.spellings = tokenizer.spellings[skip_special_tokens]
        self.errors = "anabranch-bytewise" if decoding.byte_fallback else "replace"
        """Byte-level decoders write one U+FFFD for a broken sequence, byte fallback one for each of its bytes."""
        self.first = bool(decoding.drop_first or decoding.separator) and not continues
        """The next token is the first, and that matters."""
        self.num_strip = 0 if continues else decoding.num_strip
        """Spaces that may still be dropped."""
        self.waiting = b""
        """An unfinished character: at most 3 bytes."""

    def add(self, token_id: int) -> str:
        """The text that became certain with this token; may be empty."""
        spelling = self.spellings[token_id]
        if spelling is None:
            return ""
        if self.first:
            self.first = False
            tokenizer = self.spellings.tokenizer
            spelling = tokenizer.decoding.spell(tokenizer.id_to_token(token_id) or "", first=True)
        return self._decode(spelling, final=False)

    def extend(self, token_ids: Iterable[int]) -> str:
        """`add` for several tokens."""
        if self.first or self.num_strip:
            return "".join([self.add(token_id) for token_id in token_ids])
        spellings = self.spellings
        return self._decode(b"".join([spellings[token_id] or b"" for token_id in token_ids]), final=False)

    def rest(self) -> str:
        """U+FFFD for a character that was never finished."""
        return self._decode(b"", final=True)

    def _decode(self, spelling: bytes, final: bool) -> str:
        data = self.waiting + spelling
        text, used = codecs.utf_8_decode(data, self.errors, final)
        self.waiting = data[used:]
        if self.num_strip and text:
            kept = text.lstrip(" ")
            num_dropped = min(self.num_strip, len(text) - len(kept))
            # Only at the very beginning: after the first other character spaces are kept.
            self.num_strip = 0 if kept else self.num_strip - num_dropped
            return text[num_dropped:]
        return text


class Spellings(dict[int, bytes | None]):
    """Token id → the bytes it spells, computed on first use; None: not part of the text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> bytes | None:
        if (token := self.tokenizer.id_to_token(token_id)) is None:
            return None  # not kept: the number of unknown ids has no limit
        self[token_id] = None if token_id in self.skipped else self.tokenizer.decoding.spell(token, first=False)
        return self[token_id]


_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = sorted(set(range(0x100)) - set(_VISIBLE))
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}
"""Byte-level BPE writes each byte as one visible character: itself where it is one, else from U+0100 on."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """tokenizer.json's decoder as a function of single tokens, which makes streaming exact and cheap.

    The bytes are joined and read as UTF-8. One difference from the library is intended: in a run of byte tokens that is
    not valid UTF-8 the library turns every byte into U+FFFD, even those of valid characters and line ends, so that no
    byte token is certain before its run has ended. Here only the invalid bytes become U+FFFD.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    """A token <0xE2> spells that byte."""
    replace: tuple[tuple[str, str], ...] = ()
    drop_first: str = ""
    """A mark for spaces that is dropped from the first token."""
    separator: str = ""
    """Written before every token but the first."""
    num_strip: int = 0
    """Spaces that are dropped from the beginning of the text, at most."""

    def spell(self, token: str, first: bool) -> bytes:
        if first and self.drop_first:
            token = token.replace(self.drop_first, "")
        for old, new in self.replace:
            token = token.replace(old, new)
        if self.byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token, as it is
                return token.encode()
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token if first else self.separator + token).encode()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("anabranch-bytewise", _replace_each_byte)


def read_decoding(folder: Path, decoder: Any) -> Decoding:
    """The library's decoder as a Decoding, for the decoders that generating models have."""
    if decoder is None:
        return Decoding(separator=" ")
    state = json.loads(decoder.__getstate__())
    found: dict[str, Any] = {}
    replace: list[tuple[str, str]] = []
    fused = False  # once True, the library sees one text and no longer tokens
    for step in state["decoders"] if state["type"] == "Sequence" else [state]:
        match step:
            case {"type": "ByteLevel"} if not fused:
                found["byte_level"] = fused = True
            case {"type": "ByteFallback"} if not fused:
                found["byte_fallback"] = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused or len(old) == 1:
                replace.append((old, new))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not fused:
                replace.append((mark, " "))
                if scheme != "never":
                    found["drop_first"] = mark
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                found["num_strip"] = start
            case _:
                raise ValueError(
                    f"{folder / 'tokenizer.json'}: the decoder's step {json.dumps(step, ensure_ascii=False)} is not "
                    f"supported; supported are ByteLevel, and Replace, Metaspace, ByteFallback, Fuse, Strip as "
                    f"SentencePiece models have them"
                )
    return Decoding(replace=tuple(replace), **found)


def _load(path: Path) -> Backend:
    if not path.is_file():
        raise ValueError(f"{path}: not found; text needs a tokenizer.json in the model folder")
    try:
        return Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for anything it cannot read
        if path.read_bytes().startswith(b"version https://git-lfs"):
            raise ValueError(f"{path}: is a Git LFS pointer and not the file itself; run `git lfs pull`") from None
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: not a readable tokenizer ({reason}); truncated? download it again") from None


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, and over it the older special_tokens_map.json where transformers still reads that."""
    config = read_json(path) if (path := folder / "tokenizer_config.json").is_file() else {}
    if "added_tokens_decoder" not in config and (path := folder / "special_tokens_map.json").is_file():
        config |= read_json(path)
    return config


def named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and all others with such a name, those of multimodal families included."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    if isinstance(extra := config.get("extra_special_tokens"), dict):
        named |= extra
    return {name: token for name, value in named.items() if (token := _content(value)) is not None}


def _content(value: Any) -> str | None:
    """A token is a string, or an object with its flags."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _missing_tokens(folder: Path, config: dict[str, Any], backend: Backend) -> list[AddedToken]:
    """Tokens of tokenizer_config.json that tokenizer.json may lack, or not have as special."""
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    try:
        added = {int(token_id): token for token_id, token in (config.get("added_tokens_decoder") or {}).items()}
        tokens = [AddedToken(**{flag: added[id][flag] for flag in flags if flag in added[id]}) for id in sorted(added)]
    except (AttributeError, TypeError, ValueError) as error:
        path = folder / "tokenizer_config.json"
        raise ValueError(f"{path}: added_tokens_decoder must map ids to tokens with their flags ({error})") from None
    known = {token.content for token in [*backend.get_added_tokens_decoder().values(), *tokens]}
    others = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    names = [*named_special_tokens(config).values(), *(others if isinstance(others, list) else [])]
    contents = dict.fromkeys(filter(None, map(_content, names)))
    return tokens + [AddedToken(content, special=True) for content in contents if content not in known]
