"""Drafts by a model's own draft layer (models/mtp), which runs after sampling on all rows of every step.

T token rows, R rows that sample, N drafts after each.
"""

from __future__ import annotations

import torch

from anabranch.engine.batch import HostStep, StepMaker
from anabranch.engine.sampler import captured_turns
from anabranch.engine.scheduler import Share
from anabranch.layers.mixer import Cache
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder


def known_next(shares: list[Share], rows: HostStep) -> list[tuple[int, int]]:
    """The last row of every share that does not sample, and the token that follows it."""
    found = []
    for share, end in zip(shares, rows.starts[1:]):  # where every row samples, there may be more of these
        if not share.num_samples and share.end < len(share.sequence.tokens):
            found.append((end - 1, share.sequence.tokens[share.end]))
    return found


class LayerDrafts:
    def __init__(self, model: Decoder, steps: StepMaker, cache: Cache, num_drafts: int) -> None:
        self.model, self.steps, self.cache, self.num_drafts = model, steps, cache, num_drafts

    def after_any(
        self,
        rows: HostStep,
        known: list[tuple[int, int]],
        token_R: torch.Tensor | None,
        step: Step | None,
        hidden_TD: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Run the layer on all rows of a step, each with the token that follows it: sampled (`token_R`; None: no row
        samples), `known`, or that of the next row. Returns the drafts. `step` None: `hidden_TD` has padding."""
        assert hidden_TD is not None
        if step is None:
            step, hidden_TD = self.steps.unpack_rows(rows), hidden_TD[: len(rows.slots)]
        sampling = [end - 1 for end in rows.starts[1:]] if rows.logit_rows is None else rows.logit_rows
        row_N, token_N = self.steps.upload_pairs([*((row, 0) for row in sampling), *known])
        if token_R is not None:
            token_N[: len(sampling)] = token_R.clamp(min=0)
        next_T = step.token_T.roll(-1).index_copy_(0, row_N, token_N)
        x_TD = self.model.draft(next_T, hidden_TD, step, self.cache)
        if token_R is None:
            return None
        slot_R, end_R = self.steps.upload_rows([[all[row] for row in sampling] for all in (rows.slots, rows.ends)])
        row_R = row_N[: len(sampling)]
        return self._more(slot_R, end_R, step.token_T[row_R], token_R, x_TD[row_R])

    def after_decode(
        self, packed_3R: torch.Tensor, token_R: torch.Tensor, step: Step, hidden_RD: torch.Tensor
    ) -> torch.Tensor:
        """The same where every row samples. Can be captured."""
        x_RD = self.model.draft(token_R.clamp(min=0), hidden_RD, step, self.cache)
        return self._more(packed_3R[0], packed_3R[2], step.token_T, token_R, x_RD)

    def _more(
        self,
        slot_R: torch.Tensor,
        end_R: torch.Tensor,
        input_R: torch.Tensor,
        token_R: torch.Tensor,
        x_RD: torch.Tensor,
    ) -> torch.Tensor:
        """draft_NR (see Launched.drafts) of rows that sample: their slots (−1: padding), context lengths, tokens,
        sampled tokens and rows of the draft layer. The last row of a slot up to which sampled tokens are the tokens
        that follow goes on: its drafts and its own rows are the layer's input again."""
        draft_R = self._best(x_RD)
        found = [draft_R]
        if self.num_drafts > 1:
            row_R = torch.arange(slot_R.shape[0], device=slot_R.device)
            turn_R = captured_turns(slot_R)
            wrong_R = (turn_R > 0) & (token_R.roll(1) != input_R)
            counts_R = (slot_R >= 0) & (torch.where(wrong_R, row_R, -1).cummax(0).values < row_R - turn_R)
            last_R = counts_R & ~(counts_R & (turn_R > 0)).roll(-1)
            order_R = torch.sort((~last_R).int(), stable=True).indices  # padding comes last
            slot_R = torch.where(last_R, slot_R, -1)[order_R]
            end_R, draft_R, x_RD = end_R[order_R], draft_R[order_R], x_RD[order_R]
        for _ in range(self.num_drafts - 1):
            end_R = (end_R + 1).clamp(max=self.steps.max_length)
            step = self.steps.unpack(torch.stack((slot_R, draft_R.int(), end_R)), self.steps.width, padded=True)
            x_RD = self.model.draft(draft_R, x_RD, step, self.cache)
            draft_R = self._best(x_RD)
            found.append(torch.zeros_like(draft_R).index_copy_(0, order_R, draft_R))
        return torch.stack(found)

    def _best(self, x_RD: torch.Tensor) -> torch.Tensor:
        return self.model.group.broadcast(self.model.logits(x_RD).argmax(-1))
