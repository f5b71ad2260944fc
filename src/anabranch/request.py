"""Requests to the engine, and its updates and outputs. Plain data."""

from dataclasses import dataclass, field
from typing import Literal

from anabranch.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["last", "mean"]
"""Of a prompt's hidden rows after the last norm, those that make its embedding: that of the last token, or all."""
INTERNAL = "internal error: "
"""The prefix of an Update's error that is the engine's fault. Any other error is caused by the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue. `n` > 1 makes several Requests, one for each sequence."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Lower runs earlier; equal priorities in order of arrival."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt."""
    arrival: float = 0.0
    """time.monotonic() when the request arrived."""
    pooling: Pooling | None = None
    """It wants the prompt's embedding in place of tokens; its params are embedding.PARAMS."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, fp32: the token's own, its rank, and the best alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first. The token itself is in it only if it is among the best."""


@dataclass(slots=True)  # not kw_only: a step makes one per request, which is a third quicker with positions
class Update:
    """What one step added to a request."""

    id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each of token_ids, if requested."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first token, if requested; None for the first prompt token."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token id that ended the request, if one did: the last of token_ids."""
    error: str | None = None
    routed_experts: list[list[list[int]]] | None = None
    """With the last token, if requested: [token][moe layer][k] for every token but the last."""
    embedding: bytes | None = None
    """With the end of a request with `pooling`: fp32 numbers in the machine's byte order, normalised."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """One continuation of a prompt, finished or growing."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    routed_experts: list[list[list[int]]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt: `n` completions. It has vLLM's names too: request_id, outputs, prompt_token_ids."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    completions: list[Completion]
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    embedding: bytes | None = None
    """See Update.embedding; there are no tokens then."""

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def request_id(self) -> str:
        return self.id

    @property
    def outputs(self) -> list[Completion]:
        return self.completions

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt_ids

    @property
    def num_cached_tokens(self) -> int:
        return self.num_cached

    @property
    def finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)
