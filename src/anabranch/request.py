"""A request as it enters the engine and what comes out of it. Plain data; the engine's own bookkeeping is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabranch.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
INTERNAL = "internal error: "
"""Begins the error of an Update that is the engine's fault. Any other error is the request's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to continue. `n` > 1 is several Requests: the engine samples one sequence each."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """Lower runs earlier; equal priorities in order of arrival."""
    cache_salt: str = ""
    """Prefixes are shared only between requests of the same salt."""
    arrival: float = 0.0
    """time.monotonic() when the request came in."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position, fp32: the token's own, its rank, and the best alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first. The token itself is in it only if it is among the best."""


@dataclass(slots=True)  # not kw_only: a step makes one for every request, and without names that is a third quicker
class Update:
    """What one step added to a request."""

    id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each of token_ids, if asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """With the first token, if asked for; None for the first prompt token."""
    num_cached: int = 0
    """Prompt tokens that came from the prefix cache."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token id that ended it, if one did; it is the last of token_ids."""
    error: str | None = None
    routed_experts: list[list[list[int]]] | None = None
    """At the end, if asked for: [token][moe layer][k] for every token but the last."""


@dataclass(slots=True, kw_only=True)
class Completion:
    """One finished (or growing) continuation, for users."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    routed_experts: list[list[list[int]]] | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """The answer to one prompt: `n` completions."""

    id: str
    prompt: str | None
    prompt_ids: list[int]
    completions: list[Completion]
    num_cached: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids
