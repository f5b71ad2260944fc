"""Turns the engine's updates into answers: tokens to text, stop strings, n completions of one prompt.

Used offline in the engine's own process, and when serving in the server's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabranch.request import Completion, Request, RequestOutput, Update
from anabranch.sampling_params import SamplingParams
from anabranch.text.tokenizer import Tokenizer


class Detokenizer:
    """One sequence's tokens as text: whole characters only, and cut at the first stop string.

    The pieces that `add` and `finish` return, joined, are the text of all tokens decoded at once and then cut; how the
    tokens are split into calls makes no difference. The first stop string is the one that ends first, and of those that
    end together the longest. Text that may still become a stop string is held back. With `min_tokens`, a stop string
    that is complete within that many tokens is part of the text. For `continues` see TextStream.
    """

    __slots__ = ("_first_characters", "_held", "_longest", "_params", "_stream", "num_tokens", "stopped")

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, continues: bool = False) -> None:
        self.num_tokens = 0
        """Tokens used: up to the one that completed a stop string."""
        self.stopped: str | None = None
        """The stop string that ended the text."""
        self._params = params
        self._stream = tokenizer.stream(params.skip_special_tokens, continues)
        self._held = ""
        self._first_characters = frozenset(stop[0] for stop in params.stop)
        self._longest = max(map(len, params.stop), default=0)

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that became certain; after a stop string tokens are ignored."""
        if not self._params.stop:
            self.num_tokens += len(token_ids)
            return self._stream.extend(token_ids)
        pieces = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            pieces.append(self._release(self._stream.add(token_id)))
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back. Nothing may be added after it."""
        if self.stopped is not None:
            return ""
        text = self._release(self._stream.rest())
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def check(self) -> None:
        assert len(self._stream.waiting) < 4, self._stream.waiting
        assert not (self.stopped and self._held), (self.stopped, self._held)
        assert not self._held or any(s.startswith(self._held) and s != self._held for s in self._params.stop)

    def _release(self, new: str) -> str:
        """Takes new text; returns the text before any complete or possible stop string."""
        if not self._held and self._first_characters.isdisjoint(new):  # the usual case
            return new
        text = self._held + new
        if self.num_tokens > self._params.min_tokens:
            end, begin = self._find_stop(text)
            if end:
                self.stopped, self._held = text[begin:end], ""
                return text[: end if self._params.include_stop_str_in_output else begin]
        split = self._find_possible_stop(text)
        self._held = text[split:]
        return text[:split]

    def _find_stop(self, text: str) -> tuple[int, int]:
        """End and beginning of the first stop string that ends in new text; (0, 0) if none does."""
        stops = [(text.find(stop, max(0, len(self._held) - len(stop) + 1)), len(stop)) for stop in self._params.stop]
        return min(((begin + length, begin) for begin, length in stops if begin >= 0), default=(0, 0))

    def _find_possible_stop(self, text: str) -> int:
        """Where the longest suffix of the text begins that is a prefix of a stop string."""
        for position in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[position] in self._first_characters:
                tail = text[position:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._params.stop):
                    return position
        return len(text)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one update added to one completion."""

    index: int
    text: str
    token_ids: list[int]
    completion: Completion


class Answer:
    """The growing answer to one prompt. Add Updates to it, and abort the requests that `to_abort` names."""

    def __init__(
        self,
        id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt: str | None = None,
        **options: object,
    ) -> None:
        self.requests = [
            Request(id=f"{id}-{i}", prompt_ids=tuple(prompt_ids), params=_one_of(params, i), **options)  # type: ignore[arg-type]
            for i in range(params.n)
        ]
        self.index = {request.id: i for i, request in enumerate(self.requests)}
        self.detokenizers: list[Detokenizer | None] = [None] * params.n
        if tokenizer is not None and params.detokenize:
            self.detokenizers = [Detokenizer(tokenizer, params, continues=True) for _ in self.requests]
        self.output = RequestOutput(
            id=id,
            prompt=prompt,
            prompt_ids=list(prompt_ids),
            completions=[Completion(index=i, text="", token_ids=[]) for i in range(params.n)],
        )
        self.errors: list[str] = []

    @property
    def finished(self) -> bool:
        return self.output.finished

    def add(self, update: Update) -> Delta:
        """Apply an update of one of `requests`."""
        index = self.index[update.id]
        completion = self.output.completions[index]
        if completion.finish_reason is not None:  # a stop string was found: later updates do not count
            return Delta(index, "", [], completion)
        token_ids = update.token_ids
        self.output.num_cached = max(self.output.num_cached, update.num_cached)
        if update.prompt_logprobs is not None:
            self.output.prompt_logprobs = update.prompt_logprobs
        self.output.embedding = update.embedding
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_token
        completion.routed_experts = update.routed_experts
        if update.error is not None:
            self.errors.append(update.error)
        text = ""
        detokenizer = self.detokenizers[index]
        if detokenizer is not None:
            # A token that ended the answer is not part of its text, unless asked for.
            is_shown = update.stop_token is None or self.requests[index].params.include_stop_str_in_output
            shown = token_ids if is_shown else token_ids[:-1]
            before = detokenizer.num_tokens
            text = detokenizer.add(shown)
            if detokenizer.stopped is not None:
                token_ids = token_ids[: detokenizer.num_tokens - before]
                completion.finish_reason = "stop"
                completion.stop_reason = detokenizer.stopped
            elif completion.finish_reason is not None:
                text += detokenizer.finish()
        completion.text += text
        completion.token_ids += token_ids
        if update.logprobs:
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs += update.logprobs[: len(token_ids)]
        return Delta(index, text, token_ids, completion)

    def to_abort(self, update: Update) -> bool:
        """Whether a stop string ended this request, which the engine does not know yet."""
        return update.finish_reason is None and self.output.completions[self.index[update.id]].finish_reason is not None


def _one_of(params: SamplingParams, index: int) -> SamplingParams:
    """The i-th of n completions: its own seed, so that they differ, and n = 1."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63  # wraps around
    return replace(params, n=1, seed=seed)
