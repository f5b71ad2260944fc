"""Decode steps of few rows on a CPU: their kernels are recorded once for a number of rows, then called in one go.

R rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from anabranch.kernels.c.library import MAX_ROWS
from anabranch.kernels.c.recording import record
from anabranch.layers.mixer import Cache
from anabranch.layers.step import Step
from anabranch.models.decoder import Decoder

MAX_SIZES = 4
"""Numbers of rows whose tensors are kept."""


class RecordedStep:
    """A step of some number of rows, with the tensors that it reads and writes."""

    def __init__(self, model: Decoder, caches: Sequence[Cache], width: int, step: Step, experts: list[torch.Tensor]):
        """Runs the step; `experts` gets expert_TK of each MoE layer, as it is computed. `width` of a page table."""
        self.model, self.experts = model, experts
        self.x_RD, self.ropes = model.inputs(step.token_T, step.position_T)
        tables = (torch.nn.functional.pad(table, (0, max(0, width - table.shape[1]))) for table in step.page_tables)
        slots, lengths = tuple(slot.clone() for slot in step.slots), step.context_len_R.clone()
        self.step = replace(step, page_tables=tuple(tables), slots=slots, context_len_R=lengths)
        self.hidden_RD = self.x_RD

        def forward() -> None:
            self.hidden_RD = model.run(model.loop(self.x_RD, self.ropes, None, len(caches)), self.step, caches)

        self.repeat: Callable[[], None] | None = record(forward)

    def run(self, step: Step) -> None:
        """Another step of as many rows."""
        assert self.repeat is not None
        x_RD, ropes = self.model.inputs(step.token_T, step.position_T)
        self.x_RD.copy_(x_RD)
        for mine, its in zip(self.ropes, ropes, strict=True):
            for table, new in zip(mine, its, strict=True):
                table.copy_(new)
        for slot_R, new in zip(self.step.slots, step.slots, strict=True):
            slot_R.copy_(new)
        for table, new in zip(self.step.page_tables, step.page_tables, strict=True):
            table[:, : new.shape[1]].copy_(new)
        self.step.context_len_R.copy_(step.context_len_R)
        self.repeat()


class RecordedSteps:
    """The recorded steps of a model, by their number of rows."""

    def __init__(self, model: Decoder, caches: Sequence[Cache], width: int) -> None:
        self.model, self.caches, self.width = model, caches, width
        self.by_rows: dict[int, RecordedStep] = {}
        self.last_rows = 0
        self.possible = model.group.size == 1

    def run(self, step: Step, record: Callable[[], list[torch.Tensor]]) -> RecordedStep | None:
        """The step after it has run; None: it has not. `record` starts the list of expert_TK."""
        rows, before = step.token_T.shape[0], self.last_rows
        self.last_rows = rows
        if not self.possible or step.max_query != 1 or rows > MAX_ROWS or step.drafts or step.num_tokens is not None:
            return None
        found = self.by_rows.get(rows)
        if found is not None:
            found.run(step)
            return found
        if rows != before:  # recording takes longer than the step
            return None
        found = RecordedStep(self.model, self.caches, self.width, step, record())
        if found.repeat is None:
            self.possible = False
        else:
            if len(self.by_rows) == MAX_SIZES:
                del self.by_rows[next(iter(self.by_rows))]
            self.by_rows[rows] = found
        return found
