"""Plain-text judgement of what the teacher wrote: sentence ends, quotes, repetition. No model, no tokenizer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

SENTENCE = re.compile(r"""[^.!?]*[.!?]+["']?(?=\s|$)""")
PLAIN = re.compile(r"""[A-Za-z0-9 ,.!?'":;\n-]*""")
WORD = re.compile(r"[a-z']+")
NOT_WANTED = re.compile(
    r"\b(AI|assistant|language models?|SmolLM|Hugging|kill\w*|blood\w*|dead|die|dies|died|dying|death|drunk|drugs?|"
    r"sex\w*|pregnan\w*|"
    r"gun|guns|knives|war|suicid\w*|fertility|beer|wine|hell|devil|copyright|chapter|www|http)\b",
    re.I,
)

MAY_DOUBLE = {"very", "so", "had", "that"}


def cut(text: str, max_sentences: int) -> str:
    """The first whole sentences of a continuation, with quotes closed; empty if there is none.

    "One day" begins what the next part is to tell, so the sentence before it is the last.
    """
    sentences = SENTENCE.findall(text.partition(" One day")[0])[:max_sentences]
    while sentences and "".join(sentences).count('"') % 2:
        sentences.pop()
    return "".join(sentences).rstrip()


def extend(answer: str, more: str, max_sentences: int, given: Sequence[str], hero: str) -> tuple[str, str]:
    """(answer and whole sentences of what the teacher went on with, fault of both together)."""
    more = cut(more.partition("\n")[0], max_sentences)
    if not more:
        return answer, fault(answer, given, hero)
    if more[0] not in " ,'":  # it went on within our last word
        return answer, "joint"
    return answer + more, fault(answer + more, given, hero)


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def shingles(text: str, size: int) -> list[tuple[str, ...]]:
    words = words_of(text)
    return [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]


def repeats(text: str, size: int = 4) -> int:
    """How many runs of `size` words stand in the text a second time."""
    return sum(count - 1 for count in Counter(shingles(text, size)).values())


def fault(text: str, given: Sequence[str] = (), hero: str = "") -> str:
    """Why an answer is not taken; empty: it is. `given` are the plan's own words in it."""
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
    if any(count > max(3, words.total() // 12) for word, count in words.items() if word != hero.lower()):
        return "one word"
    return "name" if _named_twice(text, " ".join(given)) else ""


def _named_twice(text: str, given: str) -> bool:
    """A name that the teacher gives to somebody new though somebody has it."""
    named = Counter(re.findall(r"\bnamed ([A-Z]\w+)", text))
    return any(number > 1 or (name in given and f"named {name}" not in given) for name, number in named.items())
