"""Steps worked out on the device are those spelled out token by token, whether it has page tables of its own or not."""

import random
from dataclasses import fields
from itertools import pairwise

import pytest
import torch

from anabranch import kernels, ops, platforms
from anabranch.engine.batch import StepMaker
from anabranch.engine.scheduler import Sequence, Share
from anabranch.layers.step import Span, Step
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

NUM_SLOTS, MAX_LENGTH, PAGE_SIZE = 6, 40, 4


def assert_same(found: Step, expected: Step) -> None:
    for field in fields(Step):
        mine, other = getattr(found, field.name), getattr(expected, field.name)
        for a, b in zip(mine, other, strict=True) if isinstance(mine, tuple) else ((mine, other),):
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype and torch.equal(a.cpu(), b), field.name
            else:
                assert a == b, field.name


class Walk:
    """Sequences that take slots, get pages and tokens, and leave."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.running: list[Sequence] = []
        self.pages: dict[str, list[list[int]]] = {}
        self.free = list(range(NUM_SLOTS))
        self.num_made = 0

    def move(self, makers: list[StepMaker]) -> None:
        if self.running and self.rng.random() < 0.2:
            gone = self.running.pop(self.rng.randrange(len(self.running)))
            self.free.append(gone.slot)
        if self.free and self.rng.random() < 0.4:
            length = self.rng.randrange(1, 9)
            prompt = tuple(self.rng.randrange(100) for _ in range(length))
            one = Sequence(Request(id=str(self.num_made), prompt_ids=prompt, params=SamplingParams()), self.num_made)
            one.slot = self.free.pop(self.rng.randrange(len(self.free)))
            self.pages[one.id] = [[], []]
            self.num_made += 1
            self.running.append(one)
            for maker in makers:
                maker.join(one.slot)

    def share(self, one: Sequence, count: int) -> Share:
        begin, one.num_computed = one.num_computed, one.num_computed + count
        for table in self.pages[one.id]:
            while len(table) * PAGE_SIZE < one.num_computed:
                table.append(self.rng.randrange(1, 1000))
        if one.num_computed < len(one.tokens):
            return Share(one, begin, one.num_computed, 0)
        return Share(one, begin, one.num_computed, self.rng.randint(1, min(count, 3)))

    def step(self, single: bool) -> list[Share]:
        shares = []
        for one in self.running:
            missing = len(one.tokens) - one.num_computed
            if not missing and len(one.tokens) < MAX_LENGTH:
                one.tokens.append(self.rng.randrange(100))
                missing = 1
            if missing and self.rng.random() < 0.8:
                shares.append(self.share(one, 1 if single else self.rng.randrange(1, missing + 1)))
        return shares


def spelled_out(shares: list[Share], pages: dict[str, list[list[int]]], last_token: list[int]) -> Step:
    """As layers.step says it."""
    tokens, positions, starts, logit_rows = [], [], [0], []
    slots: list[list[int]] = [[], []]
    for sequence, begin, end, num_samples in shares:
        for position in range(begin, end):
            known = position < len(sequence.tokens)
            tokens.append(sequence.tokens[position] if known else last_token[sequence.slot])
            positions.append(position)
            for table, slot in zip(pages[sequence.id], slots, strict=True):
                slot.append(table[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
        starts.append(len(tokens))
        logit_rows += range(len(tokens) - num_samples, len(tokens))
    columns = max(-(-share.end // PAGE_SIZE) for share in shares)
    every_row = logit_rows == list(range(len(shares))) and len(shares) == len(tokens)
    return Step(
        token_T=torch.tensor(tokens),
        position_T=torch.tensor(positions),
        query_start_R=torch.tensor(starts, dtype=torch.int32),
        context_len_R=torch.tensor([share.end for share in shares], dtype=torch.int32),
        page_tables=tuple(
            torch.tensor([(pages[s.id][group] + [-1] * columns)[:columns] for s, *_ in shares], dtype=torch.int32)
            for group in range(2)
        ),
        slots=tuple(torch.tensor(slot) for slot in slots),
        logit_row=None if every_row else torch.tensor(logit_rows, dtype=torch.int32),
        max_query=max(share.end - share.begin for share in shares),
        spans=tuple(
            Span(request, start, end, share.end)
            for request, (share, (start, end)) in enumerate(zip(shares, pairwise(starts), strict=True))
            if end - start > 1
        ),
    )


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_are_those_spelled_out(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for op in ops.OPS.values():
        monkeypatch.setattr(op, "bound", op.bound)  # as before when the test ends
    kernels.bind(platforms.make(place))
    makers = [
        StepMaker(2, NUM_SLOTS, MAX_LENGTH, PAGE_SIZE, torch.device(place), mirror=mirror)
        for mirror in ((False, True) if place == "cpu" else (True,))
    ]
    num_single = num_mixed = 0
    for seed in range(5):
        walk = Walk(seed)
        for number in range(200):
            walk.move(makers)
            shares = walk.step(single=number % 3 > 0)
            if not shares:
                continue
            last = torch.randint(100, (NUM_SLOTS + 1,))
            if number % 2:
                for sequence, _, end, _ in shares:
                    if end == len(sequence.tokens) > sequence.num_prompt:
                        sequence.tokens.pop()  # the host does not know it yet
            shares.sort(key=lambda share: share.end - share.begin > 1)
            counts = {share.end - share.begin > 1 for share in shares}
            num_single, num_mixed = num_single + (counts == {False}), num_mixed + len(counts) // 2
            expected = spelled_out(shares, walk.pages, last.tolist())
            for maker in makers:
                maker.last_token_S.copy_(last)
                step = maker.make(shares, walk.pages.__getitem__)
                for table_RM, wanted_RM in zip(step.page_tables, expected.page_tables, strict=True):
                    wanted_RM.copy_(torch.where(wanted_RM < 0, table_RM.cpu(), wanted_RM))  # beyond its pages: anything
                assert_same(step, expected)
            for sequence, _, end, _ in shares:
                if end > len(sequence.tokens):
                    sequence.tokens.append(int(last[sequence.slot]))
    assert num_single > 100 and num_mixed > 50


def test_padding_owns_nothing() -> None:
    maker = StepMaker(2, NUM_SLOTS, MAX_LENGTH, PAGE_SIZE, torch.device("cpu"))
    walk = Walk(0)
    while not walk.running:
        walk.move([maker])
    shares = [walk.share(walk.running[0], 1)]
    packed_3R = maker.pack(maker.host_step(shares, walk.pages.__getitem__), 4)
    step = maker.unpack(packed_3R, maker.width, padded=True)
    assert step.num_tokens is not None and int(step.num_tokens) == 1
    assert step.slots[0].tolist()[1:] == [-1, -1, -1] and step.context_len_R.tolist() == [1, 0, 0, 0]
    assert torch.equal(maker.padding(3)[0], torch.full((3,), -1, dtype=torch.int32))


def test_a_padded_prompt_is_the_prompt_and_rows_of_nobody() -> None:
    maker = StepMaker(2, NUM_SLOTS, MAX_LENGTH, PAGE_SIZE, torch.device("cpu"))
    walk = Walk(0)
    while not walk.running:
        walk.move([maker])
    rows = maker.host_step([walk.share(walk.running[0], 5)], walk.pages.__getitem__)
    found = maker.unpack_any(maker.pack_any(rows, 9), 1, maker.width)
    expected = maker.unpack_rows(rows)
    assert found.max_query == 9 and found.num_tokens is not None and int(found.num_tokens) == 5
    assert found.logit_row is not None and found.logit_row.tolist() == [4]
    for name in ("query_start_R", "context_len_R"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("token_T", "position_T"):
        assert torch.equal(getattr(found, name)[:5], getattr(expected, name))
    for slot_T, expected_T in zip(found.slots, expected.slots, strict=True):
        assert torch.equal(slot_T[:5], expected_T) and slot_T[5:].tolist() == [-1] * 4
    for table_RM, expected_RM in zip(found.page_tables, expected.page_tables, strict=True):
        assert table_RM.shape == (1, maker.width) and torch.equal(table_RM[:, : expected_RM.shape[1]], expected_RM)
    nobody = maker.unpack_any(maker.padding_of_one(9), 1, maker.width)
    assert nobody.query_start_R.tolist() == [0, 1] and nobody.context_len_R.tolist() == [0]
    assert nobody.num_tokens is not None and int(nobody.num_tokens) == 0 and nobody.slots[1].tolist() == [-1] * 9


@pytest.mark.parametrize("num_requests", [1, 3, 4])
def test_where_requests_are_cut(num_requests: int) -> None:
    """After so many rows, with a page in every group with states; also in a padded step."""
    maker = StepMaker(3, 8, MAX_LENGTH, PAGE_SIZE, torch.device("cpu"), states=[0, 2])
    shares, pages = [], [[3], [4], [5]]
    for slot in range(num_requests):
        request = Request(id=str(slot), prompt_ids=tuple(range(9)), params=SamplingParams())
        shares.append(Share(sequence := Sequence(request, slot), 1, 4, 0))
        sequence.slot = slot
    shares[0].sequence.cut = 3, 7, 9
    rows = maker.host_step(shares, lambda _: pages)
    assert rows.cuts == {0: (2, 7, 9)}
    for step in (maker.unpack_rows(rows), maker.unpack_any(maker.pack_any(rows, 16), num_requests, maker.width)):
        assert step.cuts is not None and step.query_start_R.tolist() == [3 * i for i in range(num_requests + 1)]
        assert {group: int(page_R[0]) for group, (_, page_R) in step.cuts.items()} == {0: 7, 2: 9}
        for values_R in (values_R for cut in step.cuts.values() for values_R in cut):
            assert values_R.dtype == torch.int32 and values_R.shape == (num_requests,)
            assert values_R.storage_offset() % 4 == 0, "kernels are compiled for addresses of whole 16 bytes"
        assert all(row_R.tolist() == [2] + [0] * (num_requests - 1) for row_R, _ in step.cuts.values())
    nobody = maker.unpack_any(maker.padding_of_one(9), 1, maker.width)
    assert nobody.cuts is not None and nobody.cuts[0][0].tolist() == [0] and nobody.context_len_R.tolist() == [0]


def test_a_dry_run_may_be_longer_than_any_request() -> None:
    """Kernels look into page tables as far as contexts go."""
    maker = StepMaker(2, num_slots=4, max_length=20, page_size=4, device=torch.device("cpu"))
    for num_tokens, num_requests in ((1, 1), (100, 1), (100, 3), (5, 4)):
        step = maker.dry_run(num_tokens, num_requests)
        new_R = step.query_start_R.diff()
        assert step.token_T.shape == step.position_T.shape == (num_tokens,) and new_R.sum() == num_tokens
        assert new_R.tolist() == step.context_len_R.tolist() == [step.max_query] + [1] * (num_requests - 1)
        for table_RM, slot_T in zip(step.page_tables, step.slots, strict=True):
            assert (step.context_len_R <= table_RM.shape[1] * 4).all() and table_RM.shape[0] == num_requests
            assert (slot_T == -1).all() and (table_RM == 0).all()
