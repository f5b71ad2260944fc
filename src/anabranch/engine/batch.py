"""Ints become tensors here and nowhere else: what sequences contribute to a step → layers.step.Step.

The page tables of running sequences are kept in flat arrays, a row for each slot, and only what changed is written.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch

from anabranch.engine.scheduler import Sequence, Share
from anabranch.layers.step import Step

Pages = Callable[[str], list[list[int]]]
"""Request id → for each KVGroup, the page of each logical page, all equally many. The same object as long as the
sequence keeps its slot: it may only get longer."""


class StepMaker:
    """Makes Steps for up to `num_slots` sequences of up to `max_length` tokens."""

    def __init__(self, num_groups: int, num_slots: int, max_length: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.width = -(-max_length // page_size)
        self.tables = [array("i", bytes(4 * num_slots * self.width)) for _ in range(num_groups)]
        self.views = [torch.frombuffer(table, dtype=torch.int32).view(num_slots, -1) for table in self.tables]
        self.written: list[tuple[object, int]] = [(None, 0)] * num_slots
        """Whose pages a slot's rows hold, and how many of them."""
        self.last_token_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """The token each slot sampled last: where the next step finds it before the host has read it."""

    def make(self, shares: list[Share], pages_of: Pages) -> Step:
        """The Step of one or more shares, in their order."""
        if all(end - begin == 1 for _, begin, end, _ in shares):
            return self._make_of_single_tokens(shares, pages_of)
        tokens: list[int] = []
        positions: list[int] = []
        query_start, context_len = [0], []
        logit_row: list[int] = []
        slots: list[list[int]] = [[] for _ in self.tables]
        fed_row, fed_slot = [], []
        page_size = self.page_size
        for sequence, begin, end, samples in shares:
            known = sequence.tokens
            tokens += known[begin:end]
            if end > len(known):  # the last one is still on the device
                fed_row.append(len(tokens))
                fed_slot.append(sequence.slot)
                tokens.append(0)
            if samples:
                logit_row.append(len(tokens) - 1)
            query_start.append(len(tokens))
            context_len.append(end)
            positions += range(begin, end)
            for table, slot in zip(self._tables_of(sequence, pages_of), slots, strict=True):
                slot += [table[i // page_size] * page_size + i % page_size for i in range(begin, end)]

        token_T = self._tensor(tokens)
        if fed_row:
            token_T[self._tensor(fed_row)] = self.last_token_S[self._tensor(fed_slot)]
        return Step(
            token_T=token_T,
            position_T=self._tensor(positions),
            query_start_R=self._tensor(query_start, torch.int32),
            context_len_R=self._tensor(context_len, torch.int32),
            page_tables=self._page_tables([share.sequence.slot for share in shares], max(context_len)),
            slots=tuple(self._tensor(slot) for slot in slots),
            logit_row=self._tensor(logit_row),
            max_query=max(end - begin for _, begin, end, _ in shares),
        )

    def _make_of_single_tokens(self, shares: list[Share], pages_of: Pages) -> Step:
        """The same where every share is one token, as in most steps: much of the Step follows from the lengths."""
        tokens: list[int] = []
        ends: list[int] = []
        owners: list[int] = []
        slots: list[list[int]] = [[] for _ in self.tables]
        page_size, all_written, fed = self.page_size, self.written, 0
        first, others = slots[0], slots[1:]
        for sequence, begin, end, _ in shares:
            known, owner = sequence.tokens, sequence.slot
            if end > len(known):
                fed += 1
                tokens.append(-1)
            else:
                tokens.append(known[begin])
            ends.append(end)
            owners.append(owner)
            tables = pages_of(sequence.id)
            whose, written = all_written[owner]
            if whose is not tables or written < len(tables[0]):
                self._write_tables(owner, tables)
            page, offset = divmod(begin, page_size)
            first.append(tables[0][page] * page_size + offset)
            for slot, table in zip(others, tables[1:]) if others else ():
                slot.append(table[page] * page_size + offset)

        token_T = self._tensor(tokens)
        if fed:
            fed_T = self.last_token_S[self._tensor(owners)]
            token_T = fed_T if fed == len(tokens) else torch.where(token_T < 0, fed_T, token_T)
        context_len_R = self._tensor(ends, torch.int32)
        row_R = torch.arange(len(shares) + 1, device=self.device)
        sampling = [row for row, share in enumerate(shares) if share.samples]
        return Step(
            token_T=token_T,
            position_T=context_len_R.long() - 1,
            query_start_R=row_R.int(),
            context_len_R=context_len_R,
            page_tables=self._page_tables(owners, max(ends)),
            slots=tuple(self._tensor(slot) for slot in slots),
            logit_row=row_R[:-1] if len(sampling) == len(shares) else self._tensor(sampling),
            max_query=1,
        )

    def _page_tables(self, owners: list[int], longest: int) -> tuple[torch.Tensor, ...]:
        index = torch.tensor(owners)
        columns = -(-longest // self.page_size)
        return tuple(view.index_select(0, index)[:, :columns].to(self.device) for view in self.views)

    def _tables_of(self, sequence: Sequence, pages_of: Pages) -> list[list[int]]:
        """The sequence's pages, after what is new of them was written into its slot's rows."""
        tables = pages_of(sequence.id)
        owner, written = self.written[sequence.slot]
        if owner is not tables or written < len(tables[0]):
            self._write_tables(sequence.slot, tables)
        return tables

    def _write_tables(self, slot: int, tables: list[list[int]]) -> None:
        """Only pages that are new; all of them when another sequence has taken the slot."""
        owner, written = self.written[slot]
        if owner is not tables:
            written = 0
        length, row = len(tables[0]), slot * self.width
        for flat, table in zip(self.tables, tables, strict=True):
            flat[row + written : row + length] = array("i", table[written:])
        self.written[slot] = tables, length

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)
