"""Structured output: a grammar becomes a Matcher, which tells before every token which tokens may come next.

llguidance does the work; it is imported when the first compiler is made. Text in, bit masks out: this file knows
nothing of requests, batches or devices. A mask's layout is that of ops.mask_logits. A regex is in Rust's syntax and
matches the whole text; its \\d is any digit of Unicode.

A grammar is compiled twice: in a process that may die of it (grammar_process), and, if it did not, here.
"""

from __future__ import annotations

import json
import signal
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anabranch.text.grammar_process import GrammarTrial, Trial, exceeded, make_matcher, reason, with_stack

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from anabranch.sampling_params import Grammar

NUM_CACHED = 128
"""Grammars that are kept, refused ones too. Matchers of one share what llguidance learns about the vocabulary."""
BYTES_CACHED = 512 << 20
"""What they may take together."""

# What compiling a grammar may take, in a process of its own: see grammar_process.
COMPILE_SECONDS = 2.0
"""Of processor time."""
WAIT_SECONDS = 0.5
"""For a processor, in addition."""
COMPILE_BYTES = 256 << 20
COMPILE_STACK = 64 << 20
"""In the engine, which an overflow would end: eight times what was enough in the trial."""
MAX_TEXT = 1_000_000  # characters


class Compiled(NamedTuple):
    """A grammar in the cache: a matcher, or why there is none."""

    matcher: Any = None
    """llguidance's, at its beginning."""
    memory: int = 0
    """Bytes, roughly."""
    refusal: str = ""
    keep: bool = True
    """False: there was no processor for it; another time there may be."""


class GrammarCompiler:
    """For one tokenizer. Making it takes about a second for a vocabulary of 150,000. Threads may share it."""

    def __init__(self, tokenizer: Backend, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """`tokenizer`: without padding and truncation. `vocab_size`: of the logits."""
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            needed = f"the Python package llguidance ({error}); run: pip install llguidance"
            raise ValueError(f"structured output needs {needed}") from None
        if not eos_ids:
            raise ValueError("structured output needs an end-of-sequence token, and this model names none")
        text = tokenizer.to_str()
        self._trial = GrammarTrial(text, vocab_size, eos_ids)  # gets ready while this process does the same
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids))
        except ValueError as error:
            self._trial.close()
            raise ValueError(f"structured output does not work with this tokenizer: {error}") from None
        self.vocab_size = vocab_size
        self._lock = threading.Lock()
        self._known: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Matcher:
        """A fresh matcher; ValueError with the reason if there can be none."""
        with self._lock:
            is_new = grammar not in self._known
            future = self._known.setdefault(grammar, Future())
            self._known.move_to_end(grammar)
        if is_new:
            try:
                future.set_result(self._compile(grammar))
            except BaseException as error:
                future.set_exception(error)
            self._forget_some(grammar, future)
        compiled = future.result()
        if compiled.matcher is None:
            raise ValueError(f"grammar: {compiled.refusal}")
        return Matcher(compiled.matcher.deep_copy(), self.vocab_size)

    def _forget_some(self, grammar: Grammar, future: Future[Compiled]) -> None:
        """Keep the cache within its limits, and without results that may differ another time."""
        with self._lock:
            if future.exception() is not None or not future.result().keep:
                self._known.pop(grammar, None)
            while len(self._known) > NUM_CACHED or sum(map(_size, self._known.values())) > BYTES_CACHED:
                self._known.popitem(last=False)

    def _compile(self, grammar: Grammar) -> Compiled:
        kind, text = _text(grammar)
        if len(text) > MAX_TEXT:
            return Compiled(refusal=f"{kind} has {len(text)} characters; at most {MAX_TEXT} are allowed")
        trial = Trial(
            kind=kind,
            text=text,
            open_objects=grammar.open_objects,
            seconds=COMPILE_SECONDS,
            wall_seconds=COMPILE_SECONDS + WAIT_SECONDS,
            memory=COMPILE_BYTES,
        )
        outcome = self._trial.run(trial)
        if outcome["signal"]:
            return Compiled(refusal=f"{kind} {exceeded(trial, outcome)}", keep=outcome["signal"] != signal.SIGALRM)
        if outcome["error"] is not None:
            return Compiled(refusal=outcome["error"])
        matcher = with_stack(COMPILE_STACK, make_matcher, self._tokenizer, outcome["source"])
        if matcher.is_error():
            return Compiled(refusal=f"{kind} cannot be used: {reason(matcher)}")
        return Compiled(matcher, outcome["memory"])

    def close(self) -> None:
        """End the process that tries grammars out; a grammar that it is working on is refused."""
        self._trial.close()


def _size(future: Future[Compiled]) -> int:
    return future.result().memory if future.done() and future.exception() is None else 0


class Matcher:
    """The state of one request in its grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self.vocab_size = vocab_size
        self.num_words = (vocab_size + 31) // 32
        self.num_accepted = 0

    def copy(self) -> Matcher:
        """Another in the same state."""
        copy = Matcher(self._matcher.deep_copy(), self.vocab_size)
        copy.num_accepted = self.num_accepted
        return copy

    def mask(self, row_M: torch.Tensor | None = None) -> torch.Tensor:
        """The tokens that may come next, as bits; written into `row_M` (int32, on the host) if given.

        EOS is among them when the text is complete, and alone when nothing can follow. Ids without a token never are.
        """
        if row_M is None:
            row_M = torch.empty(self.num_words, dtype=torch.int32)
        assert row_M.dtype == torch.int32 and row_M.shape == (self.num_words,) and row_M.is_contiguous()
        self._matcher.unsafe_compute_mask_ptr(row_M.data_ptr(), 4 * self.num_words)
        return row_M

    def accept(self, token: int) -> bool:
        """Move past a token; False, from then on, if the grammar does not allow it or gave up: `error` tells why."""
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
        return reason(self._matcher) if self._matcher.is_error() else ""


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
    from llguidance import LLExecutor

    return LLExecutor()


def _text(grammar: Grammar) -> tuple[str, str]:
    """Which field of the grammar is given, and its text."""
    if grammar.choice is not None:
        # One terminal, not one for each choice: a row of the parser holds 2000 at most. Lark's strings are JSON's.
        return "choice", "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, grammar.choice))
    kind = next(kind for kind in ("json_schema", "regex", "lark") if getattr(grammar, kind) is not None)
    return kind, getattr(grammar, kind)
