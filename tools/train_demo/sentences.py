"""Faults of a text, found without a model or a tokenizer: characters, sentence ends, quotes, repetition."""

from __future__ import annotations

import re
from collections import Counter

PLAIN = re.compile(r"""[A-Za-z0-9 ,.!?'":;\n-]*""")
WORD = re.compile(r"[a-z']+")
NOT_WANTED = re.compile(
    r"\b(AI|assistant|language models?|SmolLM|Hugging|kill\w*|blood\w*|dead|die|dies|died|dying|death|drunk|drugs?|"
    r"sex\w*|pregnan\w*|"
    r"gun|guns|knives|war|suicid\w*|fertility|beer|wine|hell|devil|copyright|chapter|www|http)\b",
    re.I,
)

MAY_DOUBLE = {"very", "so", "had", "that"}


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def repeats(text: str, size: int = 4) -> int:
    """How many runs of `size` words stand in the text a second time."""
    words = words_of(text)
    runs = Counter(tuple(words[start : start + size]) for start in range(len(words) - size + 1))
    return sum(count - 1 for count in runs.values())


def fault(text: str) -> str:
    """The first fault of an answer; empty: it has none."""
    if not PLAIN.fullmatch(text):
        return "characters"
    if NOT_WANTED.search(text.replace("small language model", "")):
        return "subject"
    if not re.search(r"""[.!?]["']?$""", text) or text.count('"') % 2:
        return "ending"
    if repeats(text) > len(words_of(text)) // 30:
        return "repeats"
    if set(re.findall(r"\b(\w+) \1\b", text.lower())) - MAY_DOUBLE:
        return "stutter"
    words = Counter(word for word in words_of(text) if len(word) > 3)
    if any(count > max(3, words.total() // 12) for count in words.values()):
        return "one word"
    names = Counter(re.findall(r"\bnamed ([A-Z]\w+)", text))
    return "name" if any(count > 1 for count in names.values()) else ""
