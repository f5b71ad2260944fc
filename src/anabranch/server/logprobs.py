"""Log probabilities in the forms clients read: chat's, completions' and vLLM's for prompts.

A token's own float stands in every place unchanged: lm-eval tells greedy tokens by equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anabranch.request import TokenLogprobs
from anabranch.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -Infinity


class TokenTexts:
    """Tokens as text and as bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.spellings = tokenizer.spellings[False]

    def bytes(self, token_id: int) -> bytes:
        return self.spellings[token_id] or b""

    def text(self, token_id: int) -> str:
        """Half a character has no text: its bytes are written out, so that different tokens look different."""
        spelling = self.bytes(token_id)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat(logprobs: Sequence[TokenLogprobs], texts: TokenTexts) -> list[dict[str, Any]]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        spelling = list(texts.bytes(token_id))
        return {"token": texts.text(token_id), "logprob": _finite(logprob), "bytes": spelling}

    return [
        one(item.token_id, item.logprob) | {"top_logprobs": [one(token, logprob) for token, logprob in item.top]}
        for item in logprobs
    ]


class CompletionLogprobs:
    """The four lists of a completion, as tokens come. With echo, the prompt's stand first."""

    def __init__(self, texts: TokenTexts) -> None:
        self.texts = texts
        self.offset = 0

    def chunk(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, item in zip(token_ids, logprobs, strict=True):
            text = self.texts.text(token_id)
            found["text_offset"].append(self.offset)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if item is None else _finite(item.logprob))
            found["top_logprobs"].append(None if item is None else self._top(item, text))
            self.offset += len(text)
        return found

    def _top(self, item: TokenLogprobs, text: str) -> dict[str, float]:
        """Best first; of two tokens that look the same the better is shown. The token itself is always among them."""
        top: dict[str, float] = {}
        for token_id, logprob in (*item.top, (item.token_id, item.logprob)):
            top.setdefault(self.texts.text(token_id), _finite(logprob))
        return top


def prompt(logprobs: Sequence[TokenLogprobs | None], texts: TokenTexts) -> list[dict[str, Any] | None]:
    """As vLLM gives them: by token id, with rank and text."""

    def one(item: TokenLogprobs) -> dict[str, Any]:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(item.top, 1)]
        ranked.insert(0, (item.token_id, item.logprob, item.rank))
        return {
            str(token): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(token)}
            for token, logprob, rank in ranked
        }

    return [None if item is None else one(item) for item in logprobs]
