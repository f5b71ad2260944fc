"""What a step gives, of its hidden rows: sampled tokens, drafts, log-probabilities of prompts, sums of rows for
embeddings. Does not know how the rows were computed, but for steps of single tokens, which are captured up to their
tokens.

R rows that sample, T token rows, K experts per token, N drafts after each token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from anabranch import kernels
from anabranch.engine.batch import HostStep, StepMaker
from anabranch.engine.expert_counter import ExpertCounter
from anabranch.engine.layer_drafts import LayerDrafts, known_next
from anabranch.engine.runner import Launched
from anabranch.engine.sampler import captured_turns
from anabranch.engine.sampling_plan import Sampled, SamplingMode, token_logprobs
from anabranch.engine.scheduler import Share
from anabranch.engine.slots import Slots
from anabranch.layers.mixer import Cache
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder
from anabranch.platforms import Platform

ROWS_OF_LOGITS = 256
"""Prompt rows whose logits are in memory at the same time."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The results of a captured decode step."""

    token_R: torch.Tensor
    """Not for requests that want more of the sampler: theirs are drawn from the logits afterwards."""
    logits_RV: torch.Tensor
    """As the model gives them."""
    experts: list[torch.Tensor]
    """expert_TK of each MoE layer."""
    hidden_RD: torch.Tensor | None
    """For the draft layer; None: there is none."""
    draft_NR: torch.Tensor | None
    """What it expects after each token (see Launched.drafts)."""


@dataclass(frozen=True, slots=True)
class Outputs:
    platform: Platform
    model: Decoder
    steps: StepMaker
    slots: Slots
    experts: ExpertCounter
    layer_drafts: LayerDrafts | None
    drafting: bool
    """Whether a slot may have several rows that sample."""

    def mode(self, shares: list[Share], rows: HostStep) -> SamplingMode | None:
        """How a captured step of single tokens samples; None: the step cannot be one."""
        if rows.max_query > 1 or rows.logit_rows is not None:
            return None
        asking = self.slots.prompt_rows
        if asking and any(begin < s.num_prompt and s.slot in asking for s, begin, _, _ in shares):
            return None
        return self.slots.sampler.mode(rows.slots)

    def decode(self, kind: SamplingMode, packed_3R: torch.Tensor, kv: list[Cache], drafts: bool = False) -> Decoded:
        """What is captured: a step of single tokens, from the host's three numbers a row to the tokens it samples."""
        step = self.steps.unpack(packed_3R, self.steps.width, padded=True, drafts=drafts)
        recorded = self.experts.record(True)
        hidden_RD, draft_NR = self.model(step, kv), None
        logits_RV = self.model.logits(hidden_RD)
        slot_R = packed_3R[0].long()
        slot_R = torch.where(slot_R < 0, self.steps.last_token_S.shape[0] - 1, slot_R)
        turn_R = captured_turns(slot_R) if self.drafting and kind == "drawn" else None
        token_R = self.model.group.broadcast(self.slots.sampler.sample_slots(logits_RV, slot_R, kind, turn_R))
        self.steps.last_token_S.index_copy_(0, slot_R, token_R)
        if self.layer_drafts is not None:
            draft_NR = self.layer_drafts.after_decode(packed_3R, token_R, step, hidden_RD)
        self.experts.count(recorded)
        return Decoded(token_R, logits_RV, recorded, hidden_RD if draft_NR is not None else None, draft_NR)

    def of_decoded(self, shares: list[Share], rows: HostStep, mode: SamplingMode | None, decoded: Decoded) -> Launched:
        launched, num_rows = Launched(shares, sampling_shares(shares, rows)), len(rows.slots)
        if mode == "any":
            self._sample(launched, decoded.logits_RV[:num_rows])
            self._draft(launched, rows, None, decoded.hidden_RD)  # the graph did so too, but with other tokens
        else:
            launched.sampled = Sampled(decoded.token_R[:num_rows])
            launched.tokens = self.platform.fetch(launched.sampled.token_R)
            if decoded.draft_NR is not None:
                launched.drafts = self.platform.fetch(decoded.draft_NR[:, :num_rows])
        return launched

    def of_rows(self, shares: list[Share], rows: HostStep, step: Step, hidden_TD: torch.Tensor) -> Launched:
        launched = Launched(shares, sampling_shares(shares, rows))
        if self.slots.prompt_rows:
            self._prompt_logprobs(launched, hidden_TD)
            self._pool(launched, hidden_TD)
        if launched.sampling:
            self._sample(launched, self.logits(step, hidden_TD))
        self._draft(launched, rows, step, hidden_TD)
        return launched

    def _prompt_logprobs(self, launched: Launched, hidden_TD: torch.Tensor) -> None:
        for share, row, targets in prompt_parts(launched.shares):
            target_T = torch.tensor(targets, device=hidden_TD.device)
            logits_TV = self.model.logits(hidden_TD[row : row + len(targets)])
            found = token_logprobs(logits_TV, target_T, share.sequence.request.params.prompt_logprobs or 0)
            launched.prompt_logprobs.setdefault(share.sequence.id, []).append(found.to_host())

    def _pool(self, launched: Launched, hidden_TD: torch.Tensor) -> None:
        found, end = [], 0
        for share in launched.shares:
            end += share.end - share.begin
            if count := share.num_pooled:
                rows_TD = hidden_TD[end - count : end]
                found.append(exact_sum(rows_TD) if kernels.deterministic_bound() else rows_TD.float().sum(0))
        launched.pooled = self.platform.fetch(torch.stack(found)) if found else None

    def logits(self, step: Step, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Of the rows that sample."""
        return self.model.logits(hidden_TD if step.logit_row is None else hidden_TD[step.logit_row])

    def _sample(self, launched: Launched, logits_RV: torch.Tensor) -> None:
        slots = [share.sequence.slot for share in launched.sampling]
        launched.sampled = self.slots.sampler.sample(logits_RV, slots)
        self.steps.keep_tokens(slots, self.model.group.broadcast(launched.sampled.token_R))
        launched.tokens = self.platform.fetch(launched.sampled.token_R)

    def _draft(self, launched: Launched, rows: HostStep, step: Step | None, hidden_TD: torch.Tensor | None) -> None:
        if self.layer_drafts is not None:
            token_R = None if launched.sampled is None else launched.sampled.token_R
            known = known_next(launched.shares, rows)
            draft_NR = self.layer_drafts.after_any(rows, known, token_R, step, hidden_TD)
            launched.drafts = None if draft_NR is None else self.platform.fetch(draft_NR)


def sampling_shares(shares: list[Share], rows: HostStep) -> list[Share]:
    """The share of each row that samples."""
    if rows.logit_rows is None and len(rows.slots) == len(shares):
        return shares
    return [share for share in shares for _ in range(share.num_samples)]


def prompt_parts(shares: list[Share]) -> Iterator[tuple[Share, int, list[int]]]:
    """The rows whose logits log-probabilities of prompts need, a bounded number at a time: their share, the first of
    them, and the tokens that they predict."""
    row = 0
    for share in shares:
        targets = share.prompt_targets
        for begin in range(0, len(targets), ROWS_OF_LOGITS):
            yield share, row + begin, targets[begin : begin + ROWS_OF_LOGITS]
        row += share.end - share.begin


def exact_sum(x_TD: torch.Tensor) -> torch.Tensor:
    """Σ of rows, in any order and in any parts: in steps of 2⁻²⁴, fp64 adds them exactly up to 2²⁹."""
    return (x_TD.double() * 2.0**24).round().sum(0) / 2.0**24
