"""Ints become tensors here and nowhere else: what sequences contribute to a step → layers.step.Step.

A step in which every sequence has one token, which most are, is packed into three numbers a row; the device works out
the rest (ops.decode_inputs), so that such a step can be captured and takes one small copy. Other steps are spelled out.

The page tables of running sequences lie on the device, a row for each slot, and only what changed is written.

R rows, S slots, M page-table width.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import torch

from anabranch import ops
from anabranch.engine.scheduler import Sequence, Share
from anabranch.layers.step import Step

Pages = Callable[[str], list[list[int]]]
"""Request id → for each KVGroup, the page of each logical page, all equally many. The same object as long as the
sequence keeps its slot: it may only get longer."""


class StepMaker:
    """Makes Steps for up to `num_slots` sequences of up to `max_length` tokens."""

    def __init__(
        self,
        num_groups: int,
        num_slots: int,
        max_length: int,
        page_size: int,
        device: torch.device,
        mirror: bool | None = None,
    ) -> None:
        self.page_size = page_size
        self.device = device
        self.pinned = device.type != "cpu"
        self.width = -(-max_length // page_size)
        self.host_tables = [array("i", bytes(4 * num_slots * self.width)) for _ in range(num_groups)]
        self.tables = [torch.frombuffer(table, dtype=torch.int32).view(num_slots, -1) for table in self.host_tables]
        """[S, M] each, on the device."""
        self.mirror = self.pinned if mirror is None else mirror
        """Whether the device has tables of its own; else it reads the host's."""
        if self.mirror:
            self.tables = [table.clone().to(device) for table in self.tables]
        self.changes: list[tuple[int, int]] = []
        """Ranges of the flat host tables that the device does not know yet."""
        self.written: list[tuple[object, int]] = [(None, 0)] * num_slots
        """Whose pages a slot's rows hold, and how many of them."""
        self.joined: set[int] = set()
        """Slots that somebody has taken since their rows were written."""
        self.last_token_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """The token each slot sampled last: where the next step finds it before the host has read it. The last entry
        takes what padding rows sample."""

    def join(self, slot: int) -> None:
        """Another sequence has taken the slot."""
        self.written[slot] = None, 0
        self.joined.add(slot)

    def make(self, shares: list[Share], pages_of: Pages) -> Step:
        """The Step of one or more shares, in their order."""
        rows = self._rows(shares, pages_of)
        if rows is None:
            return self._spell_out(shares, pages_of)
        packed_3R = self._packed(*rows).to(self.device, non_blocking=True)
        columns = -(-max(rows[2]) // self.page_size)
        sampling = [row for row, (_, _, _, samples) in enumerate(shares) if samples]
        logit_row = sampling if len(sampling) < len(shares) else None
        return self.unpack(packed_3R, columns, padded=False, logit_row=logit_row)

    # -- steps of single tokens ----------------------------------------------------------------------------------------

    def pack(self, shares: list[Share], pages_of: Pages, num_rows: int) -> torch.Tensor:
        """packed_3R of ops.decode_inputs, in host memory, with padding up to `num_rows`. Every share is one token."""
        rows = self._rows(shares, pages_of)
        assert rows is not None
        slots, tokens, ends = rows
        padding = num_rows - len(shares)
        return self._packed(slots + [-1] * padding, tokens + [0] * padding, ends + [0] * padding)

    def _packed(self, slots: list[int], tokens: list[int], ends: list[int]) -> torch.Tensor:
        packed_3R = torch.frombuffer(array("i", slots + tokens + ends), dtype=torch.int32).view(3, -1)
        return packed_3R.pin_memory() if self.pinned else packed_3R

    def _rows(self, shares: list[Share], pages_of: Pages) -> tuple[list[int], list[int], list[int]] | None:
        """(slots, tokens, ends) of shares of one token each, the device's page tables being brought up to date; None
        where one has more."""
        slots: list[int] = []
        tokens: list[int] = []
        ends: list[int] = []
        page_size, joined = self.page_size, self.joined
        for sequence, begin, end, _ in shares:
            if end - begin != 1:
                return None
            slot, known = sequence.slot, sequence.tokens
            slots.append(slot)
            tokens.append(known[begin] if begin < len(known) else -1)
            ends.append(end)
            if begin % page_size == 0 or (joined and slot in joined):
                self._tables_of(sequence, pages_of)
        self.update_tables()
        return slots, tokens, ends

    def unpack(
        self, packed_3R: torch.Tensor, columns: int, *, padded: bool, logit_row: list[int] | None = None
    ) -> Step:
        """The Step of what `pack` gave, on the device; contexts take at most `columns` pages. Can be captured."""
        token_R, position_R, query_start_R, context_len_R, num_tokens = ops.decode_inputs(packed_3R, self.last_token_S)
        pages = [ops.decode_pages(packed_3R, table_SM, self.page_size, columns) for table_SM in self.tables]
        return Step(
            token_T=token_R,
            position_T=position_R,
            query_start_R=query_start_R,
            context_len_R=context_len_R,
            page_tables=tuple(table for table, _ in pages),
            slots=tuple(slot_R for _, slot_R in pages),
            logit_row=None if logit_row is None else self._upload(logit_row),
            max_query=1,
            num_tokens=num_tokens if padded else None,
        )

    def padding(self, num_rows: int) -> torch.Tensor:
        """packed_3R, on the device, of padding alone."""
        packed_3R = torch.zeros(3, num_rows, dtype=torch.int32, device=self.device)
        packed_3R[0] = -1
        return packed_3R

    def keep_tokens(self, slots: list[int], token_R: torch.Tensor) -> None:
        """What the slots sampled last."""
        self.last_token_S.index_copy_(0, self._upload(slots), token_R)

    def rehearsal(self, num_tokens: int, num_requests: int = 1) -> Step:
        """One request with many new tokens and others with one, whose keys go nowhere: for kernels to be compiled."""
        most = num_tokens - num_requests + 1
        new_R = torch.tensor([most] + [1] * (num_requests - 1), dtype=torch.int32)
        query_start_R = torch.nn.functional.pad(new_R.cumsum(0, dtype=torch.int32), (1, 0))
        rows_T = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        # May be longer than any request: the tables of this machine's requests would be too narrow.
        table_RM = torch.zeros(num_requests, -(-most // self.page_size), dtype=torch.int32, device=self.device)
        return Step(
            token_T=rows_T,
            position_T=rows_T,
            query_start_R=query_start_R.to(self.device),
            context_len_R=new_R.to(self.device),
            page_tables=tuple(table_RM for _ in self.tables),
            slots=tuple(rows_T - 1 for _ in self.tables),
            logit_row=None,
            max_query=most,
        )

    # -- other steps ---------------------------------------------------------------------------------------------------

    def _spell_out(self, shares: list[Share], pages_of: Pages) -> Step:
        tokens, positions = array("q"), array("q")
        query_start, context_len = [0], []
        logit_row: list[int] = []
        owners: list[int] = []
        slots = [array("q") for _ in self.tables]
        fed_row, fed_slot = [], []
        page_size = self.page_size
        for sequence, begin, end, samples in shares:
            known = sequence.tokens
            tokens.extend(known[begin:end])
            if end > len(known):  # the last one is still on the device
                fed_row.append(len(tokens))
                fed_slot.append(sequence.slot)
                tokens.append(0)
            if samples:
                logit_row.append(len(tokens) - 1)
            query_start.append(len(tokens))
            context_len.append(end)
            owners.append(sequence.slot)
            positions.extend(range(begin, end))
            for table, slot in zip(self._tables_of(sequence, pages_of), slots, strict=True):
                for first in range(begin - begin % page_size, end, page_size):  # a page at a time
                    move = table[first // page_size] * page_size - first
                    slot.extend(range(max(begin, first) + move, min(end, first + page_size) + move))
        self.update_tables()

        token_T = self._upload(tokens)
        if fed_row:
            token_T[self._upload(fed_row)] = self.last_token_S[self._upload(fed_slot)]
        owner_R, columns = self._upload(owners), -(-max(context_len) // page_size)
        return Step(
            token_T=token_T,
            position_T=self._upload(positions),
            query_start_R=self._upload(query_start, torch.int32),
            context_len_R=self._upload(context_len, torch.int32),
            page_tables=tuple(table.index_select(0, owner_R)[:, :columns] for table in self.tables),
            slots=tuple(self._upload(slot) for slot in slots),
            logit_row=self._upload(logit_row),
            max_query=max(end - begin for _, begin, end, _ in shares),
        )

    # -- page tables ---------------------------------------------------------------------------------------------------

    def update_tables(self) -> None:
        """Bring the device's tables up to date, before work that reads them is enqueued."""
        if not self.changes:
            return
        places = [place for begin, end in self.changes for place in range(begin, end)]
        self.changes = []
        place_N = self._upload(places)
        for host, table in zip(self.host_tables, self.tables, strict=True):
            table.view(-1).index_copy_(0, place_N, self._upload([host[place] for place in places], torch.int32))

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
        self.joined.discard(slot)
        for flat, table in zip(self.host_tables, tables, strict=True):
            flat[row + written : row + length] = array("i", table[written:])
        self.written[slot] = tables, length
        if self.mirror:
            self.changes.append((row + written, row + length))

    def _upload(self, values: list[int] | array[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """To the device, without waiting for it."""
        if not values:
            return torch.empty(0, dtype=dtype, device=self.device)
        flat = values if isinstance(values, array) else array("i" if dtype == torch.int32 else "q", values)
        host = torch.frombuffer(flat, dtype=dtype)
        return (host.pin_memory() if self.pinned else host).to(self.device, non_blocking=True)
