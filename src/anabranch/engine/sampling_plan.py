"""The data of engine.sampler: the request in a slot, penalty counts, the plan of a batch, and what it returns: tokens
on the device, log probabilities that are being copied to the host. Letters as there; T tokens, N best alternatives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from anabranch import ops
from anabranch.request import Request, TokenLogprobs
from anabranch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from anabranch.text.grammar import Matcher

GREEDY_BELOW = 1e-5
"""Lower temperatures would divide logits out of fp32's range; they are greedy."""
FOREVER = 1 << 62
CHUNK = 1 << 23
"""Logits handled by one call of an op; the reference of ops.sample takes about 50 bytes for each on the way."""

Trait = Literal["greedy", "unfiltered", "filtered", "edited", "masked", "penalized", "needs_host", "logprobs"]
"""What a request wants of the sampler: one of the first three (filtered: by top_k, top_p or min_p), any of the others.
needs_host: the host must have read its last token before the next can be sampled."""
RANDOM: tuple[Trait, ...] = ("unfiltered", "filtered")
SPECIAL: tuple[Trait, ...] = ("edited", "masked", "penalized", "needs_host", "logprobs")
"""What needs more than draws by the slots' parameters."""


@dataclass(slots=True, eq=False)
class Occupant:
    """The request in a slot."""

    request: Request
    output_ids: tuple[int, ...]
    """As of `add`; not kept up to date."""
    matcher: Matcher | None
    edits: list[tuple[int, float, int]]
    """(token, what is added to its logit: a bias or −∞, the number of generated tokens with which this ends)"""
    bad_sequences: list[tuple[int, ...]]
    """Bad words of several tokens."""
    history: list[int]
    """The output as far as the host knows it, if there are bad sequences."""
    unread: bool = False
    """A token was sampled that the host must accept before the next."""
    # Made on the device when the batch first includes the request:
    edit_token_E: torch.Tensor | None = None
    edit_value_E: torch.Tensor | None = None
    edit_until_E: torch.Tensor | None = None
    allowed_M: torch.Tensor | None = None
    penalty_row: int | None = None

    # Derived from its parameters:
    traits: tuple[Trait, ...] = field(init=False)
    timed: bool = field(init=False)
    """Some edits end."""

    def __post_init__(self) -> None:
        p = self.request.params
        greedy = p.temperature < GREEDY_BELOW or p.top_k == 1
        filtered = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
        has: dict[Trait, bool] = {
            "greedy": greedy,
            "filtered": filtered and not greedy,
            "unfiltered": not (filtered or greedy),
            "edited": bool(self.edits),
            "masked": bool(p.allowed_token_ids),
            "penalized": p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1,
            "needs_host": self.matcher is not None or bool(self.bad_sequences),
            "logprobs": p.logprobs is not None,
        }
        self.traits = tuple(trait for trait, there in has.items() if there)
        self.timed = any(until != FOREVER for _, _, until in self.edits)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    def completing(self) -> Iterator[int]:
        """Tokens that would complete a bad word now."""
        for *beginning, last in self.bad_sequences:
            if self.history[-len(beginning) :] == beginning:
                yield last


class PenaltyTable:
    """Which tokens prompts had and how often outputs did: a row for each request with penalties, made when needed."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.count_PV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.prompt_PV = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self.free: list[int] = []

    def take(self, prompt: torch.Tensor, output: torch.Tensor) -> int:
        if not self.free:
            num_rows, vocab_size = self.count_PV.shape
            more = max(4, num_rows)
            self.free = list(range(num_rows, num_rows + more))[::-1]
            self.count_PV = torch.cat([self.count_PV, self.count_PV.new_empty(more, vocab_size)])
            self.prompt_PV = torch.cat([self.prompt_PV, self.prompt_PV.new_empty(more, vocab_size)])
        row = self.free.pop()
        self.prompt_PV[row].zero_().index_fill_(0, prompt, True)
        self.count_PV[row].zero_().index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        return row

    def count(self, row_N: torch.Tensor, token_N: torch.Tensor, one_N: torch.Tensor) -> None:
        """One more of a token in each of some different rows."""
        self.count_PV.view(-1).index_add_(0, row_N * self.count_PV.shape[1] + token_N, one_N)


SamplingMode = Literal["greedy", "drawn", "any"]
"""What a step needs: the best token of each row; draws by the slots' parameters alone; anything."""


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows that draw at random."""

    row_N: torch.Tensor | None
    """None: all rows."""
    slot_N: torch.Tensor
    arguments: list[torch.Tensor]
    """Temperatures and seeds; then top_k, top_p and min_p, if they exclude tokens."""


@dataclass(frozen=True, slots=True)
class Edits:
    index_E: torch.Tensor
    """Into the flattened logits."""
    value_E: torch.Tensor
    slot_E: torch.Tensor
    until_E: torch.Tensor | None
    """None: all forever."""


@dataclass(frozen=True, slots=True)
class Penalty:
    row_N: torch.Tensor
    table_row_N: torch.Tensor
    amounts: list[torch.Tensor]
    """presence_N, frequency_N, repetition_N"""
    one_N: torch.Tensor


@dataclass(slots=True)
class SamplingPlan:
    """What a step over these slots does; valid until a request joins or leaves."""

    greedy: bool
    """Some row is greedy."""
    slot_R: torch.Tensor
    one_R: torch.Tensor
    draws: list[Draw] = field(default_factory=list)
    edits: Edits | None = None
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    """row_N, allowed_NM"""
    penalty: Penalty | None = None
    needing_host: list[Occupant] = field(default_factory=list)
    matchers: list[Matcher] = field(default_factory=list)
    matcher_row_N: torch.Tensor | None = None
    bad: list[tuple[int, Occupant]] = field(default_factory=list)
    """(row, request) where there are bad words of several tokens."""
    logprobs_rows: list[int] = field(default_factory=list)
    """Rows that want log probabilities."""
    logprobs_row_L: torch.Tensor | None = None
    """None: all rows."""
    top_n: int = 0

    @property
    def changes_logits(self) -> bool:
        return bool(self.edits or self.allowed or self.penalty or self.matchers or self.bad)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of T tokens, with the N best at each place."""

    token_T: torch.Tensor
    logprob_T: torch.Tensor
    rank_T: torch.Tensor
    top_id_TN: torch.Tensor
    top_logprob_TN: torch.Tensor

    def to_host(self) -> Logprobs:
        """A copy that may be read once the device has come this far."""
        tensors = self.token_T, self.logprob_T, self.rank_T, self.top_id_TN, self.top_logprob_TN
        return Logprobs(*(tensor.to("cpu", non_blocking=True) for tensor in tensors))

    def at(self, t: int, top_n: int) -> TokenLogprobs:
        """As plain numbers; for the host's copy."""
        top = zip(self.top_id_TN[t, :top_n].tolist(), self.top_logprob_TN[t, :top_n].tolist())
        return TokenLogprobs(int(self.token_T[t]), float(self.logprob_T[t]), int(self.rank_T[t]), tuple(top))

    def all(self, top_n: int) -> list[TokenLogprobs]:
        return [self.at(t, top_n) for t in range(self.token_T.shape[0])]


def token_logprobs(logits_TV: torch.Tensor, token_T: torch.Tensor, top_n: int) -> Logprobs:
    """Log probabilities of `token_T` under the logits (in any float dtype; computed in fp32, some rows at a time)."""
    top_n = min(top_n, logits_TV.shape[1])
    parts = [ops.logprobs(logits_TV[part].float(), token_T[part], top_n) for part in chunks(*logits_TV.shape)]
    if len(parts) == 1:
        return Logprobs(token_T, *parts[0])
    return Logprobs(token_T, *(torch.cat(tensors) for tensors in zip(*parts)))


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled."""

    token_R: torch.Tensor
    """int64, on the device."""
    logprobs: Mapping[int, tuple[Logprobs, int]] = field(default_factory=dict)
    """Of rows that asked, and the place there. Copies to the host, enqueued with the step: once its tokens can be read,
    so can they."""

    def token_logprobs(self, row: int, top_n: int) -> TokenLogprobs:
        """Of a row that asked for at least `top_n` alternatives."""
        assert row in self.logprobs, f"row {row} asked for no log probabilities"
        logprobs, place = self.logprobs[row]
        return logprobs.at(place, top_n)


def chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Row ranges of at most CHUNK logits (but at least a row); one empty range if there are no rows."""
    step = max(1, CHUNK // vocab_size)
    for begin in range(0, max(num_rows, 1), step):
        yield slice(begin, min(begin + step, num_rows))
