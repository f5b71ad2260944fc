"""Structured output: a grammar becomes a Matcher, which says before every token which tokens may come next.

The work is llguidance's; it is imported when the first compiler is made. Text in, bit masks out: this file knows
nothing of requests, batches or devices. A mask's layout is that of ops.mask_logits. A regex is in Rust's syntax and
matches the whole text; its \\d is any digit of Unicode.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from decimal import Decimal, InvalidOperation
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from anabranch.sampling_params import Grammar

NUM_CACHED = 128
"""Compiled grammars that are kept; their Matchers share what llguidance learns about the vocabulary on the way."""

# What a grammar may cost. llguidance's own limits hold a step to tens of milliseconds; those on compilation are made
# tighter here, because some schemas within its defaults take seconds.
COMPILE_SECONDS = 2.0
MAX_TEXT = 1_000_000  # characters
LIMITS = {"initial_lexer_fuel": 300_000, "max_grammar_size": 30_000, "verbose_errors": False}
# A multipleOf costs a lexer state for every remainder, outside all of llguidance's limits: 10⁸ would take all memory.
MAX_REMAINDERS = 50_000


class GrammarCompiler:
    """For one tokenizer. Making it takes about a second for a vocabulary of 150,000."""

    def __init__(self, tokenizer: Backend | str | Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer`: the tokenizers library's, or the folder of a tokenizer.json. `vocab_size`: of the logits."""
        llguidance = _llguidance()
        if not eos_ids:
            raise ValueError("structured output needs an end-of-sequence token, and this model names none")
        if isinstance(tokenizer, str | Path):
            from anabranch.engine.tokenizer import Tokenizer

            tokenizer = Tokenizer(tokenizer).backend
        plain = copy(tokenizer)
        plain.no_padding()
        plain.no_truncation()
        try:
            self._tokenizer = llguidance.LLTokenizer(plain.to_str(), n_vocab=vocab_size, eos_token=list(eos_ids))
        except ValueError as error:
            raise ValueError(f"structured output does not work with this tokenizer: {error}") from None
        self.vocab_size = vocab_size
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()

    def compile(self, grammar: Grammar) -> Matcher:
        """A fresh matcher; ValueError with the reason if there can be none."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compile(grammar)
            if len(self._compiled) > NUM_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Matcher(compiled.deep_copy(), self.vocab_size)

    def _compile(self, grammar: Grammar) -> Any:
        kind, text = _text(grammar)
        if len(text) > MAX_TEXT:
            raise ValueError(f"grammar: {kind} has {len(text)} characters; at most {MAX_TEXT} are allowed")
        source = _source(kind, text)
        compiled: list[Any] = []

        def work() -> None:
            llguidance = _llguidance()
            limits = llguidance.LLParserLimits(**LIMITS)
            matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
            matcher.compute_bitmask()  # some grammars show only here that they are too large
            compiled.append(matcher)

        # llguidance cannot be interrupted, but lets other threads run: one that takes too long is left to end alone.
        thread = threading.Thread(target=work, name="grammar", daemon=True)
        thread.start()
        thread.join(COMPILE_SECONDS)
        if not compiled:
            raise ValueError(f"grammar: {kind} is too complex: not compiled within {COMPILE_SECONDS:g} seconds")
        if compiled[0].is_error():
            raise ValueError(f"grammar: {kind} cannot be used: {_reason(compiled[0])}")
        return compiled[0]


class Matcher:
    """Where one request stands in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self.num_words = (vocab_size + 31) // 32
        self.num_accepted = 0

    def mask(self, row_M: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens that may come next, as bits; written into `row_M` (int32, on the host) if given.

        EOS is among them when the text is complete, and alone when nothing can follow. Ids that no token has never are.
        """
        if row_M is None:
            row_M = torch.empty(self.num_words, dtype=torch.int32)
        assert row_M.dtype == torch.int32 and row_M.shape == (self.num_words,) and row_M.is_contiguous()
        self._matcher.unsafe_compute_mask_ptr(row_M.data_ptr(), 4 * self.num_words)
        return row_M

    def accept(self, token: int) -> bool:
        """Move past a token; False if the grammar does not allow it or gave up: `error` says why, and it stays so."""
        accepted: bool = self._matcher.consume_token(token)
        self.num_accepted += accepted
        return accepted

    @property
    def is_finished(self) -> bool:
        """Nothing but EOS can follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped and not self._matcher.is_error()

    @property
    def error(self) -> str:
        return _reason(self._matcher) if self._matcher.is_error() else ""


def fill_masks(matchers: Sequence[Matcher], mask_NM: torch.Tensor) -> None:
    """Each matcher's mask into its row, on several cores."""
    if len(matchers) == 1:
        matchers[0].mask(mask_NM[0])
        return
    assert mask_NM.dtype == torch.int32 and mask_NM.shape[0] == len(matchers) and mask_NM.is_contiguous()
    rows = [(matcher._matcher, row) for row, matcher in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(rows, mask_NM.data_ptr(), 4 * mask_NM.shape[1], mask_NM.shape[0])


@cache
def _executor() -> Any:
    return _llguidance().LLExecutor()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError(
            f"structured output needs the Python package llguidance ({error}); run: pip install llguidance"
        ) from None
    return llguidance


def _reason(matcher: Any) -> str:
    text: str = matcher.get_error()
    return text.replace("<non-verbose/>", "").strip()


def _text(grammar: Grammar) -> tuple[str, str]:
    """Which field of the grammar is given, and its text."""
    if grammar.choice is not None:
        # One terminal, not one for each choice: a row of the parser holds 2000 at most. Lark's strings are JSON's.
        return "choice", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, grammar.choice))
    for kind in ("json_schema", "regex", "lark"):
        text = getattr(grammar, kind)
        if text is not None:
            return kind, text
    raise AssertionError(grammar)


def _source(kind: str, text: str) -> str:
    """The grammar in llguidance's own form."""
    matcher = _llguidance().LLMatcher
    source: str
    if kind == "regex":
        source = matcher.grammar_from_regex(text)
    elif kind == "json_schema":
        try:
            schema = json.loads(text)
            text = json.dumps(schema, allow_nan=False)  # llguidance pastes it into a larger JSON text as it is
        except (ValueError, RecursionError) as error:
            raise ValueError(f"grammar: json_schema is not JSON: {error}") from None
        _check_remainders(kind, _multiples(schema))
        try:  # oneOf as anyOf: "and no other of them" cannot be said by a grammar
            source = matcher.grammar_from_json_schema(
                "{}" if schema is True else text, defaults={"coerce_one_of": True}
            )
        except ValueError as error:
            raise ValueError(f"grammar: json_schema cannot be used: {error}") from None
    else:
        if kind == "lark":  # may have JSON schemas inside
            spelled_out = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
            _check_remainders(kind, re.findall(r'"multipleOf"\s*:\s*([-+.\deE]+)', spelled_out))
        source = matcher.grammar_from_lark(text)
    return source


def _multiples(schema: object) -> Iterator[object]:
    """All values of multipleOf."""
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if "multipleOf" in value:
                yield value["multipleOf"]
            todo += value.values()
        elif isinstance(value, list):
            todo += value


def _check_remainders(kind: str, multiples: Iterable[object]) -> None:
    total = 0
    for multiple in multiples:
        try:
            digits = Decimal(str(multiple)).as_tuple().digits
        except InvalidOperation:
            continue  # not a number: llguidance refuses it
        number = int("".join(map(str, digits)))
        for factor in (2, 5):  # of the base ten: only a number's last digits tell the remainder
            while number and number % factor == 0:
                number //= factor
        total += number
    if total > MAX_REMAINDERS:
        raise ValueError(
            f"grammar: {kind} is too complex: multipleOf needs {total} remainders, at most {MAX_REMAINDERS} are allowed"
        )
