"""The data of engine.sampler: the request in a slot, penalty counts, the plan of a batch. Letters as there."""

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
"""Lower temperatures would divide logits out of fp32's range; they are greedy."""
FOREVER = 1 << 62

Trait = Literal["greedy", "unfiltered", "filtered", "edited", "masked", "penalized", "needs_host", "logprobs"]
"""What a request wants of the sampler: one of the first three (filtered: by top_k, top_p or min_p), any of the others.
needs_host: the host must have read its last token before the next can be sampled."""
RANDOM: tuple[Trait, ...] = ("unfiltered", "filtered")
SPECIAL: tuple[Trait, ...] = ("edited", "masked", "penalized", "needs_host", "logprobs")
"""What needs more than draws by the slots' parameters."""


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
