"""Updates become answers: tokens to text, stop strings, n completions of one prompt. Used wherever users are near:
offline in the same process, when serving on the other side of the process border.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anabranch.request import Completion, Request, RequestOutput, Update
from anabranch.sampling_params import SamplingParams
from anabranch.text.detokenizer import Detokenizer
from anabranch.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What one update added to one completion."""

    index: int
    text: str
    token_ids: list[int]
    completion: Completion


class Answer:
    """One prompt's answer while it grows. Feed it Updates; `abort` what it says has stopped."""

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
        return all(completion.finish_reason is not None for completion in self.output.completions)

    def add(self, update: Update) -> Delta:
        """Apply an update of one of `requests`. If a stop string ended it, the engine does not know yet: see
        `to_abort`."""
        index = self.index[update.id]
        completion = self.output.completions[index]
        if completion.finish_reason is not None:  # a stop string was found; what still comes does not count
            return Delta(index, "", [], completion)
        token_ids = update.token_ids
        self.output.num_cached = max(self.output.num_cached, update.num_cached)
        if update.prompt_logprobs is not None:
            self.output.prompt_logprobs = update.prompt_logprobs
        completion.finish_reason = update.finish_reason
        completion.stop_reason = update.stop_token
        completion.routed_experts = update.routed_experts
        if update.error is not None:
            self.errors.append(update.error)
        text = ""
        detokenizer = self.detokenizers[index]
        if detokenizer is not None:
            # A token that ended the answer is not part of its text, unless asked for.
            shown = token_ids[:-1] if update.stop_token is not None and not detokenizer.shows_stop_token else token_ids
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
        """Whether the engine must be told that this request has ended: a stop string did it."""
        return update.finish_reason is None and self.output.completions[self.index[update.id]].finish_reason is not None


def _one_of(params: SamplingParams, index: int) -> SamplingParams:
    """The i-th of n completions: its own seed, so that they differ, and n = 1."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + 2**63) % 2**64 - 2**63  # wraps round
    return replace(params, n=1, seed=seed)
