"""What a sampler remembers: the request in a slot, the counts that penalties need, and what a batch of slots does.

Data only; engine.sampler makes all of it and acts on it. Letters as there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

if TYPE_CHECKING:
    from anabranch.text.grammar import Matcher

GREEDY_BELOW = 1e-5
"""Temperatures that would divide logits out of fp32's range; none of them differs from greedy."""
FOREVER = 1 << 62

Trait = Literal["greedy", "uncut", "cut", "edited", "masked", "penalized", "waiting", "asking"]
"""What a request wants of the sampler: one of the first three (`cut`: not all tokens may be drawn), any of the others.
`waiting` ones need the host's tokens, `asking` ones want log probabilities."""
SPECIAL: tuple[Trait, ...] = ("edited", "masked", "penalized", "waiting", "asking")
"""What draws by the slots' parameters alone do not do."""


@dataclass(frozen=True, slots=True)
class Edit:
    token: int
    value: float
    """Added to its logit: a bias, or −∞."""
    until: int = FOREVER
    """While the request has fewer tokens than this."""


@dataclass(slots=True, eq=False)
class Occupant:
    """The request in a slot."""

    request: Request
    output_ids: tuple[int, ...]
    """As of `add`; not kept up to date."""
    matcher: Matcher | None
    edits: list[Edit]
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

    # What its parameters come to:
    traits: tuple[Trait, ...] = field(init=False)
    timed: bool = field(init=False)
    """Some edits end."""

    def __post_init__(self) -> None:
        p = self.request.params
        greedy = p.temperature < GREEDY_BELOW or p.top_k == 1
        cut = p.top_k > 0 or p.top_p < 1 or p.min_p > 0
        has: dict[Trait, bool] = {
            "greedy": greedy,
            "cut": cut and not greedy,
            "uncut": not (cut or greedy),
            "edited": bool(self.edits),
            "masked": bool(p.allowed_token_ids),
            "penalized": p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1,
            "waiting": self.matcher is not None or bool(self.bad_sequences),
            "asking": p.logprobs is not None,
        }
        self.traits = tuple(trait for trait, there in has.items() if there)
        self.timed = any(edit.until != FOREVER for edit in self.edits)

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

    def release(self, row: int) -> None:
        self.free.append(row)

    def count(self, row_N: torch.Tensor, token_N: torch.Tensor, one_N: torch.Tensor) -> None:
        """One more of a token in each of some different rows."""
        self.count_PV.view(-1).index_add_(0, row_N * self.count_PV.shape[1] + token_N, one_N)


Kind = Literal["greedy", "drawn", "any"]
"""What a step needs of sampling: the best of each row; a draw by the slots' parameters and nothing else; anything."""


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
class Plan:
    """What a step over these slots does; holds until a request comes or goes."""

    greedy: bool
    """Some row is greedy."""
    slot_R: torch.Tensor
    one_R: torch.Tensor
    """What is added to their numbers of tokens."""
    draws: list[Draw] = field(default_factory=list)
    edits: Edits | None = None
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None
    """row_N, allowed_NM"""
    penalty: Penalty | None = None
    waiting: list[Occupant] = field(default_factory=list)
    """Those that need the host's tokens."""
    matchers: list[Matcher] = field(default_factory=list)
    matcher_row_N: torch.Tensor | None = None
    bad: list[tuple[int, Occupant]] = field(default_factory=list)
    """Row and request of those with bad words of several tokens."""
    asked: list[int] = field(default_factory=list)
    """Rows that want log probabilities."""
    asked_row_L: torch.Tensor | None = None
    """None: all rows."""
    top_n: int = 0

    @property
    def changes_logits(self) -> bool:
        return bool(self.edits or self.allowed or self.penalty or self.matchers or self.bad)
