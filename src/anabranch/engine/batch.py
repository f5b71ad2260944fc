"""Makes the tensors of a step (layers.step.Step) from the scheduler's ints. No other file does.

A step is three numbers a token row; the device computes the rest (ops.decode_inputs). So a step in which every sequence
has one token can be captured and takes one small copy.

The page tables of running sequences are on the device, a row for each slot, and only changes are written.

R requests, T token rows, S slots, M page-table width.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from anabranch import ops
from anabranch.engine.runner import Pages
from anabranch.engine.scheduler import Share
from anabranch.layers.step import Drafts, Span, Step


class HostStep(NamedTuple):
    """A step as plain ints. Example: a sequence in slot 5 whose ninth token is on the device, then one in slot 2 with
    three prompt tokens after a known prefix of 4:

        slots = [5 2 2 2]   tokens = [-1 11 12 13]   ends = [9 5 6 7]   starts = [0 1 4]   max_query = 3
    """

    slots: list[int]
    tokens: list[int]
    """−1: the one that the slot sampled last, which only the device knows."""
    ends: list[int]
    """The length of the context with that token."""
    starts: list[int]
    """The first row of every request, and the end."""
    logit_rows: list[int] | None
    """The rows that sample; None: the last row of every request."""
    max_query: int
    """The most rows of a request."""
    tried: list[int] | None = None
    """Of each request, its rows if there are drafts among them, else 0; None: there are none."""
    cuts: dict[int, tuple[int, ...]] = {}
    """By request: after how many of its rows its states are kept too, and the page for it in each group with states."""

    def separate(self) -> HostStep:
        """The same step, each row as a request of its own; where every row samples. Rows are written into pages before
        any is read, so a row sees those before it there."""
        return self._replace(starts=list(range(len(self.slots) + 1)), logit_rows=None, max_query=1)

    def padded(self, num_rows: int) -> list[int]:
        """Slots, tokens and ends of `num_rows` rows."""
        padding = num_rows - len(self.slots)
        zeros = [0] * padding
        return [*self.slots, *[-1] * padding, *self.tokens, *zeros, *self.ends, *zeros]


Tried = tuple[int, int, int, int]
"""Of a request in a step with drafts: its slot, its first row, how many rows count, and the tokens before them."""


def tried_rows(shares: list[Share], counts: list[int]) -> list[Tried]:
    """The arguments are Runner.settle's."""
    # Where every row samples, all of them were tried (HostStep.separate); else those of shares with drafts.
    all_tried = all(end - begin == num_samples for _, begin, end, num_samples in shares)
    tried: list[Tried] = []
    row = 0
    for (sequence, begin, end, num_samples), count in zip(shares, counts, strict=True):
        if all_tried or num_samples > 1:
            tried.append((sequence.slot, row, count, begin))
        row += end - begin
    return tried


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
        states: Collection[int] = (),
        num_ahead: int = 0,
    ) -> None:
        """`states`: groups in which a request has one state, its logical page 0. Steps have no other column of their
        page tables, so that kernels find these pages one after another. `num_ahead`: as in KVCache."""
        self.page_size = page_size
        self.states = states
        self.num_parts = 2 + len(states) if states else 1
        """Of what `pack_any` gives of requests: starts; where there are states, cuts and their pages."""
        self.num_ahead = num_ahead
        self.max_length = max_length
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
        """Ranges of the flat host tables that are not on the device yet."""
        self.written: list[tuple[object, int]] = [(None, 0)] * num_slots
        """Whose pages a slot's rows hold, and how many of them."""
        self.log: list[tuple[int, int]] | None = None
        """Ranges of the flat host tables that were written, for who reads and clears them."""
        self.joined: set[int] = set()
        """Slots that a sequence has taken since their rows were written."""
        self.last_token_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        """The token each slot sampled last: the next step reads it there before the host has it. Negative: none (see
        ops.sample). The last entry is for padding rows."""

    def join(self, slot: int) -> None:
        """Another sequence has taken the slot."""
        self.written[slot] = None, 0
        self.joined.add(slot)

    def make(self, shares: list[Share], pages_of: Pages) -> Step:
        """The Step of one or more shares, those of one token first."""
        return self.unpack_rows(self.host_step(shares, pages_of))

    # -- on the host ---------------------------------------------------------------------------------------------------

    def host_step(self, shares: list[Share], pages_of: Pages) -> HostStep:
        """Shares of one token come first. The device's page tables are brought up to date."""
        num_single = len(shares)
        while num_single and shares[num_single - 1].end - shares[num_single - 1].begin > 1:
            num_single -= 1
        several = shares[num_single:]
        sequences, begins, single_ends, samples = zip(*shares[:num_single], strict=True) if num_single else ((),) * 4
        slots = [sequence.slot for sequence in sequences]
        tokens = [s.tokens[begin] if begin < len(s.tokens) else -1 for s, begin in zip(sequences, begins)]
        ends, starts = list(single_ends), list(range(num_single + 1))
        page_size, joined = self.page_size, self.joined
        changed = [s for s, begin in zip(sequences, begins) if not begin % page_size or s.slot in joined]
        for sequence in sequences if self.num_ahead else changed:
            self._write_tables(sequence.slot, pages_of(sequence.id))
        cuts: dict[int, tuple[int, ...]] = {}
        for sequence, begin, end, _ in several:
            count = end - begin
            slots += [sequence.slot] * count
            tokens += sequence.tokens[begin:end]
            if end > len(sequence.tokens):  # drafts; else the last one is still on the device
                tokens += sequence.drafts or [-1]
            ends += range(begin + 1, end + 1)
            if sequence.cut:
                cuts[len(starts) - 1] = sequence.cut[0] - begin, *sequence.cut[1:]
            starts.append(len(slots))
            self._write_tables(sequence.slot, pages_of(sequence.id))
        self.update_tables()
        logit_rows = None
        if not all(samples) or any(share.num_samples != 1 for share in several):
            logit_rows = [
                row
                for share, end in zip(shares, starts[1:], strict=True)
                for row in range(end - share.num_samples, end)
            ]
        tried = None
        if any(share.num_samples > 1 for share in several):
            tried = [end - begin if num_samples > 1 else 0 for _, begin, end, num_samples in shares]
        max_query = max((end - begin for _, begin, end, _ in several), default=1)
        return HostStep(slots, tokens, ends, starts, logit_rows, max_query, tried, cuts)

    def pack(self, rows: HostStep, num_rows: int) -> torch.Tensor:
        """packed_3R of ops.decode_inputs, in host memory, padded to `num_rows`; where every share is of one token."""
        assert rows.max_query == 1
        return self._host(array("i", rows.padded(num_rows))).view(3, -1)

    def pack_any(self, rows: HostStep, num_rows: int) -> torch.Tensor:
        """The first row of every request, cuts, then packed_3T, in host memory; requests of any number of tokens."""
        # One copy. Kernels are compiled apart for addresses that are not multiples of 16 bytes.
        width = -(-len(rows.starts) // 4) * 4
        flat = rows.starts + [0] * (width * self.num_parts - len(rows.starts))
        for r, cut in rows.cuts.items():
            flat[width + r :: width] = cut
        return self._host(array("i", flat + rows.padded(num_rows)))

    # -- on the device -------------------------------------------------------------------------------------------------

    def unpack_rows(self, rows: HostStep) -> Step:
        columns = -(-max(rows.ends) // self.page_size)
        if rows.max_query == 1:
            packed_3R = self.pack(rows, len(rows.slots)).to(self.device, non_blocking=True)
            step = self.unpack(packed_3R, columns, padded=False, drafts=rows.tried is not None)
        else:
            flat = self.pack_any(rows, len(rows.slots)).to(self.device, non_blocking=True)
            step = self.unpack_any(flat, len(rows.starts) - 1, columns)
            spans = [Span(r, a, b, rows.ends[b - 1]) for r, (a, b) in enumerate(pairwise(rows.starts)) if b - a > 1]
            step = replace(step, max_query=rows.max_query, spans=tuple(spans), num_tokens=None)
            if rows.tried is not None and self.states:
                count_R, context_len_R = self._upload(rows.tried, torch.int32), step.context_len_R
                others_R = context_len_R.masked_fill(count_R > 0, 0)
                drafts = Drafts(step.query_start_R[:-1], count_R, context_len_R - count_R, others_R)
                step = replace(step, drafts=drafts)
        return step if rows.logit_rows is None else self.sampling(step, rows.logit_rows)

    def sampling(self, step: Step, logit_rows: list[int]) -> Step:
        """The step, with the logits of these rows wanted."""
        return replace(step, logit_row=self._upload(logit_rows, torch.int32))

    def unpack_any(self, flat: torch.Tensor, num_requests: int, columns: int) -> Step:
        """The Step of what `pack_any` gave, on the device; all requests sample. Can be captured."""
        width = -(-(num_requests + 1) // 4) * 4
        query_start_R, packed_3T = flat[: num_requests + 1], flat[width * self.num_parts :].view(3, -1)
        rows_R, *pages = (flat[i * width :][:num_requests] for i in range(1, max(2, self.num_parts)))
        last_row_R = query_start_R[1:] - 1
        step = self.unpack(packed_3T.index_select(1, last_row_R), columns, padded=False)
        token_T, position_T, _, _, num_tokens = ops.decode_inputs(packed_3T, self.last_token_S)
        return replace(
            step,
            token_T=token_T,
            position_T=position_T,
            query_start_R=query_start_R,
            slots=tuple(ops.decode_pages(packed_3T, table, self.page_size, 0)[1] for table in self.tables),
            logit_row=last_row_R,
            max_query=packed_3T.shape[1],
            num_tokens=num_tokens,
            cuts={group: (rows_R, page_R) for group, page_R in zip(self.states, pages)} or None,
        )

    def unpack(self, packed_3R: torch.Tensor, columns: int, *, padded: bool, drafts: bool = False) -> Step:
        """The Step of what `pack` gave, on the device; contexts take at most `columns` pages. Can be captured.
        `drafts`: a slot may have several rows, one after another."""
        token_R, position_R, query_start_R, context_len_R, num_tokens = ops.decode_inputs(packed_3R, self.last_token_S)
        pages = [
            ops.decode_pages(packed_3R, table_SM, self.page_size, 1 if group in self.states else columns)
            for group, table_SM in enumerate(self.tables)
        ]
        return Step(
            token_T=token_R,
            position_T=position_R,
            query_start_R=query_start_R,
            context_len_R=context_len_R,
            page_tables=tuple(table for table, _ in pages),
            slots=tuple(slot_R for _, slot_R in pages),
            logit_row=None,
            max_query=1,
            num_tokens=num_tokens if padded else None,
            drafts=_runs(packed_3R[0], context_len_R) if drafts and self.states else None,
        )

    def padding(self, num_rows: int) -> torch.Tensor:
        """packed_3R, on the device, of padding alone."""
        packed_3R = torch.zeros(3, num_rows, dtype=torch.int32, device=self.device)
        packed_3R[0] = -1
        return packed_3R

    def padding_of_one(self, num_rows: int) -> torch.Tensor:
        """What `pack_any` gives, on the device, of one request whose only row is padding, and padding."""
        start = torch.tensor([0, 1, 0, 0] + [0] * 4 * (self.num_parts - 1), dtype=torch.int32, device=self.device)
        return torch.cat((start, self.padding(num_rows).flatten()))

    def keep_tokens(self, slots: list[int], token_R: torch.Tensor) -> None:
        """What the slots sampled last; of a slot that comes several times, the last token."""
        if len(set(slots)) < len(slots):
            last_row = {slot: row for row, slot in enumerate(slots)}
            slots, token_R = list(last_row), token_R[self._upload(list(last_row.values()))]
        self.last_token_S.index_copy_(0, self._upload(slots), token_R)

    def dry_run(self, num_tokens: int, num_requests: int = 1, *, padded: bool = False) -> Step:
        """One request with many new tokens and others with one, whose keys go nowhere: for kernels to be compiled."""
        most = num_tokens - num_requests + 1
        new_R = torch.tensor([most] + [1] * (num_requests - 1), dtype=torch.int32)
        query_start_R = torch.nn.functional.pad(new_R.cumsum(0, dtype=torch.int32), (1, 0))
        # May be longer than any request: the tables of this machine's requests would be too narrow.
        table_RM = torch.zeros(num_requests, -(-most // self.page_size), dtype=torch.int32, device=self.device)
        packed_3T = self.padding(num_tokens)
        token_T, position_T, _, _, no_tokens = ops.decode_inputs(packed_3T, self.last_token_S)
        return Step(
            token_T=token_T,
            position_T=position_T,
            query_start_R=query_start_R.to(self.device),
            context_len_R=new_R.to(self.device),
            page_tables=tuple(
                table_RM[:, :1].contiguous() if group in self.states else table_RM for group in range(len(self.tables))
            ),
            slots=tuple(ops.decode_pages(packed_3T, table, self.page_size, 0)[1] for table in self.tables),
            logit_row=None,
            max_query=most,
            spans=(Span(0, 0, most, most),) if most > 1 else (),
            num_tokens=no_tokens if padded else None,
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

    def _write_tables(self, slot: int, tables: list[list[int]]) -> None:
        """Only pages that are new; all of them when another sequence has taken the slot."""
        owner, written = self.written[slot]
        if owner is not tables:
            written = 0
        length, row = len(tables[0]), slot * self.width
        self.joined.discard(slot)
        if written == length:
            return
        for flat, table in zip(self.host_tables, tables, strict=True):
            flat[row + written : row + length] = array("i", table[written:])
        self.written[slot] = tables, length
        if self.mirror:
            self.changes.append((row + written, row + length))
        if self.log is not None:
            self.log.append((row + written, row + length))

    def apply(self, tables: list[tuple[int, list[array[int]]]]) -> None:
        """Write entries that another StepMaker has logged: where they begin, and those of each group."""
        for begin, entries in tables:
            end = begin + len(entries[0])
            for host, values in zip(self.host_tables, entries, strict=True):
                host[begin:end] = values
            if self.mirror:
                self.changes.append((begin, end))
        self.update_tables()

    def upload_pairs(self, pairs: list[tuple[int, int]]) -> torch.Tensor:
        """[2, N] of int64."""
        return self._upload([first for first, _ in pairs] + [second for _, second in pairs]).view(2, -1)

    def upload_rows(self, rows: list[list[int]]) -> torch.Tensor:
        """A row of int32 for each list."""
        return self._upload([value for row in rows for value in row], torch.int32).view(len(rows), -1)

    def _host(self, values: array[int]) -> torch.Tensor:
        """In memory that the device can copy from while the host goes on."""
        host = torch.frombuffer(values, dtype=torch.int32 if values.typecode == "i" else torch.int64)
        return host.pin_memory() if self.pinned else host

    def _upload(self, values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """To the device, without waiting for it."""
        if not values:
            return torch.empty(0, dtype=dtype, device=self.device)
        return self._host(array("i" if dtype == torch.int32 else "q", values)).to(self.device, non_blocking=True)


def _runs(slot_R: torch.Tensor, context_len_R: torch.Tensor) -> Drafts:
    """Rows of the same slot as requests of several rows. Can be captured."""
    row_R = torch.arange(slot_R.shape[0], dtype=torch.int32, device=slot_R.device)
    same_RR = slot_R[:, None] == slot_R
    later_R = (slot_R < 0) | (same_RR & (row_R < row_R[:, None])).any(1)
    count_R = same_RR.sum(1, dtype=torch.int32).masked_fill(later_R, 0)
    return Drafts(row_R, count_R, context_len_R - 1, None)
