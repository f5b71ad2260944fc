"""The scheduler over real pages and tree, on a device that is a dict: nothing leaks, everybody gets their answer."""

import random

import pytest

from anabranch.engine.kv_cache import KVCache
from anabranch.engine.scheduler import Scheduler, Sequence, Share
from anabranch.layers.cache import CacheGroup, CacheSpec, KeepAll, KeepWindow, OneState
from anabranch.request import Request
from anabranch.sampling_params import SamplingParams

FULL = CacheGroup((0,), CacheSpec(((1, 2), (1, 2)), KeepAll()))
WINDOW = 7
SLIDING = CacheGroup((1,), CacheSpec(((1, 2), (1, 2)), KeepWindow(WINDOW)))
STATE = CacheGroup((2,), CacheSpec(((2, 2),), OneState()))
EOS = 9


class Guesses:
    """A drafter that knows what comes next and is often wrong."""

    def __init__(self, world, sequence) -> None:
        self.world, self.sequence, self.random = world, sequence, random.Random(sequence.id)

    def propose(self, tokens, most) -> list[int]:
        assert tokens == self.sequence.tokens and most >= 1
        found: list[int] = []
        while len(found) < most and self.random.random() < 0.9:
            right = self.world.token_after(self.sequence, (*tokens, *found))
            found.append(right if self.random.random() < 0.7 else self.random.randrange(12))
        return found


class World:
    """Scheduler, pages, and a device that is a dict: which token's key each slot of each page holds."""

    def __init__(
        self, groups=(FULL,), pages=(24,), page_size=4, budget=16, seqs=5, max_len=60, depth=1, ends=True, drafts=0,
        num_ahead=0, cuts=False,
    ):  # fmt: skip
        self.random = random.Random(0)
        self.num_kinds = 12 if ends else EOS  # EOS is the 10th of 12 kinds of token
        self.groups, self.page_size, self.depth = groups, page_size, depth
        options = {"state_interval": 8, "num_ahead": num_ahead, "cuts": cuts}
        self.kv = KVCache(groups, pages, page_size, max_chunk=budget, **options)
        self.kv.longest = max_len
        self.kv.answer_interval = 8
        self.drafts, self.max_samples, self.num_accepted = drafts, 2 * seqs, 0
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_len,
            max_drafts=drafts,
            max_samples=self.max_samples,
        )
        self.device: dict[tuple[int, int, int], tuple] = {}
        self.launched: list[list[tuple[Share, list[int]]]] = []
        self.sequences: dict[str, Sequence] = {}
        self.finished: dict[str, Sequence] = {}
        self.num_added = self.num_cuts = 0

    def add(self, prompt, max_tokens, priority=0, salt="", waits=False) -> Sequence:
        request = Request(
            id=str(self.num_added),
            prompt_ids=tuple(prompt),
            params=SamplingParams(max_tokens=max_tokens),
            priority=priority,
            cache_salt=salt,
        )
        sequence = Sequence(request, self.num_added, waits, frozenset({EOS}))
        self.num_added += 1
        if self.drafts and not waits:
            sequence.drafter = Guesses(self, sequence)
        self.scheduler.add(sequence)
        self.sequences[sequence.id] = sequence
        return sequence

    def step(self) -> None:
        shares = self.scheduler.schedule()
        assert sum(share.end - share.begin for share in shares) <= self.scheduler.max_num_batched_tokens
        assert len({share.sequence.id for share in shares}) == len(shares)
        assert sum(share.num_samples for share in shares) <= self.max_samples
        several = [share.end - share.begin > 1 for share in shares]
        assert several == sorted(several), "shares of one token come first"
        if shares:
            for g, source, target in self.kv.copies:
                self.device[g, target, 0] = self.device[g, source, 0]
            self.kv.copies.clear()
            self.launched.append([(share, self.compute(share)) for share in shares])
        if self.launched and (len(self.launched) > self.depth or not shares):
            self.read(self.launched.pop(0))

    def compute(self, share: Share) -> list[int]:
        """Write keys for the share's tokens, drafts included; check that every key its queries see is the sequence's
        own, and that a state is that of the tokens before. Returns what its rows sample."""
        sequence = share.sequence
        assert share.end <= sequence.num_tokens + len(sequence.drafts)
        tables = self.kv.pages(sequence.id)
        salt = sequence.request.cache_salt
        assert len(tables[0]) * self.page_size >= min(share.end + self.kv.num_ahead, self.kv.longest)
        for g, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            if group is STATE:
                if share.begin:
                    assert self.device[g, table[0], 0] == (salt, self.history(sequence, share.begin - 1)), sequence.id
                if sequence.cut and share.end - share.begin > 1:
                    at, page = sequence.cut  # there is one group with states
                    assert share.begin < at < share.end and at % self.page_size == 0 and share.num_samples < 2
                    assert page != table[0]
                    self.device[g, page, 0] = salt, self.history(sequence, at - 1)
                    self.num_cuts += 1
                if share.num_samples < 2:  # else once it is known which drafts count
                    self.device[g, table[0], 0] = salt, self.history(sequence, share.end - 1)
                continue
            for i in range(share.begin, share.end):
                key = g, table[i // self.page_size], i % self.page_size
                self.device[key] = salt, i, self.history(sequence, i)
            for query in {share.begin, share.end - 1}:
                for i in range(max(0, query - WINDOW + 1) if group is SLIDING else 0, query + 1):
                    key = g, table[i // self.page_size], i % self.page_size
                    assert self.device[key] == (salt, i, self.history(sequence, i)), (sequence.id, i)
        ends = range(share.end - share.num_samples + 1, share.end + 1)
        return [self.token_after(sequence, self.history(sequence, end - 1)) for end in ends]

    def history(self, sequence: Sequence, i: int) -> tuple:
        """What a key at position i depends on: all tokens up to it (those on the device are a function of the rest),
        be they drafts."""
        tokens = [*sequence.tokens, *sequence.drafts][: i + 1]
        while len(tokens) <= i:
            tokens.append(self.token_after(sequence, tuple(tokens)))
        return tuple(tokens)

    def token_after(self, sequence: Sequence, tokens: tuple) -> int:
        return random.Random(hash((sequence.request.prompt_ids, tokens))).randrange(self.num_kinds)

    def read(self, launched: list[tuple[Share, list[int]]]) -> None:
        for share, tokens in launched:
            count = self.scheduler.verify(share, tokens) if share.num_samples > 1 else share.num_samples
            self.num_accepted += max(0, count - 1)
            if share.num_samples > 1 and share.sequence.slot >= 0:
                known = share.sequence.request.cache_salt, self.history(share.sequence, share.begin + count - 1)
                for g, table in enumerate(self.kv.pages(share.sequence.id)):
                    if self.groups[g] is STATE:
                        self.device[g, table[0], 0] = known
            for token in tokens[:count]:
                if self.scheduler.read(share.sequence, token) and share.sequence.finish_reason:
                    self.finished[share.sequence.id] = self.sequences.pop(share.sequence.id)

    def abort(self, id: str) -> None:
        self.scheduler.finish(self.sequences.pop(id), "abort")

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work and not self.launched:
                break
            self.step()
            self.scheduler.check()
        assert not self.scheduler.has_work and not self.sequences

    def alone(self, sequence: Sequence) -> list[int]:
        """The answer without anybody else."""
        tokens: tuple = sequence.request.prompt_ids
        while True:
            token = self.token_after(sequence, tokens)
            tokens += (token,)
            done = len(tokens) - sequence.num_prompt
            if token == EOS or done >= sequence.request.params.max_tokens or len(tokens) >= 60:
                return list(tokens)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Few distinct beginnings, so that prefixes are shared."""
    stems = [[rng.randrange(12) for _ in range(20)] for _ in range(4)]
    return [rng.choice(stems)[: rng.randrange(21)] + [rng.randrange(12)] for _ in range(count)]


WORLDS = {
    "full": {},
    "full and sliding": {"groups": (FULL, SLIDING), "pages": (24, 16)},
    "sliding": {"groups": (SLIDING,), "pages": (18,)},
    "full and state": {"groups": (FULL, STATE), "pages": (24, 7)},
    "few states": {"groups": (FULL, STATE), "pages": (24, 4)},
    "state, full and sliding": {"groups": (STATE, FULL, SLIDING), "pages": (8, 24, 16), "depth": 0},
    "tight, with states": {"groups": (FULL, STATE), "pages": (16, 9), "seqs": 8, "budget": 6},
    "full and state, cuts": {"groups": (FULL, STATE), "pages": (24, 7), "cuts": True},
    "few states, cuts": {"groups": (FULL, STATE), "pages": (24, 4), "cuts": True},
    "state, full and sliding, cuts": {
        "groups": (STATE, FULL, SLIDING),
        "pages": (8, 24, 16),
        "depth": 0,
        "cuts": True,
        "budget": 30,
    },
    "tight, with states, cuts": {"groups": (FULL, STATE), "pages": (16, 9), "seqs": 8, "budget": 6, "cuts": True},
    "page of 1, cuts": {"groups": (FULL, STATE), "page_size": 1, "pages": (80, 9), "cuts": True},
    "synchronous": {"depth": 0},
    "page of 1": {"page_size": 1, "pages": (80,)},
    "tight": {"pages": (16,), "seqs": 8, "budget": 6},
    "drafts": {"drafts": 4},
    "drafts, synchronous": {"drafts": 4, "depth": 0},
    "drafts, full and sliding": {"drafts": 4, "groups": (FULL, SLIDING), "pages": (24, 16), "depth": 0},
    "drafts longer than a page, sliding": {"drafts": 7, "groups": (SLIDING,), "pages": (18,), "seqs": 8, "depth": 0},
    "drafts, full and state": {"drafts": 4, "groups": (FULL, STATE), "pages": (24, 7), "depth": 0},
    "drafts, tight, with states": {"drafts": 3, "groups": (FULL, STATE), "pages": (16, 9), "seqs": 8, "depth": 0},
    "drafts, full and state, cuts": {
        "drafts": 4,
        "groups": (FULL, STATE),
        "pages": (24, 7),
        "depth": 0,
        "cuts": True,
    },
    "drafts, ahead": {"drafts": 3, "num_ahead": 2, "groups": (FULL, STATE), "pages": (24, 7), "depth": 0},
    "drafts, ahead, tight": {"drafts": 4, "num_ahead": 6, "pages": (16,), "seqs": 8, "budget": 6},
    "drafts, tight": {"drafts": 3, "pages": (16,), "seqs": 8, "budget": 6},
}


@pytest.mark.parametrize("name", WORLDS)
def test_random_walk(name: str, thorough: bool) -> None:
    """Add, step, abort in random order; all bookkeepers checked after each; every answer as if alone."""
    for seed in range(4 if thorough else 1):
        rng = random.Random(f"{name} {seed}")
        world = World(**WORLDS[name])
        kinds = prompts(rng, 200)
        for _ in range(4500):
            what = rng.random()
            if what < 0.10 and len(world.sequences) < 30:
                world.add(
                    rng.choice(kinds),
                    rng.randrange(1, 25),
                    priority=rng.choice([0, 0, 0, 1, -1]),
                    salt=rng.choice(["", "", "x"]),
                    waits=rng.random() < 0.1,
                )
            elif what < 0.12 and world.sequences:
                world.abort(rng.choice(sorted(world.sequences)))
            else:
                world.step()
            world.scheduler.check()
        world.drain()
        assert len(world.finished) > 100
        for sequence in world.finished.values():
            assert sequence.tokens == world.alone(sequence), sequence.id
        for pool, cached in zip(world.kv.pools, world.kv.tree.num_cached, strict=True):
            assert pool.num_free + cached == pool.num_pages
        assert world.kv.num_hits > 0
    assert "tight" not in name or world.scheduler.num_preemptions > 0
    assert (world.num_accepted > 100) == ("drafts" in name)
    assert (world.num_cuts > 100) == ("cuts" in name)


def test_eight_times_more_than_the_pool_holds() -> None:
    rng = random.Random(3)
    world = World(pages=(20,), seqs=64, budget=32, ends=False)
    all_sequences = [world.add([rng.randrange(12) for _ in range(25)], 30) for _ in range(24)]
    world.drain()
    assert world.scheduler.num_preemptions > 0
    for sequence in all_sequences:
        assert sequence.tokens == world.alone(sequence)


def test_a_stream_of_long_prompts_starves_nobody() -> None:
    """While one long prompt after another arrives, running sequences get a token in every step."""
    world = World(pages=(400,), page_size=4, budget=16, seqs=8, max_len=400, depth=0, ends=False)
    short = world.add([1, 2, 3], 40)
    short_tokens = 0
    for _ in range(35):
        world.add([world.random.randrange(12) for _ in range(150)], 2)
        before = len(short.tokens)
        world.step()
        short_tokens += len(short.tokens) - before
    assert short_tokens == 35
    first_long = world.sequences.get("1") or world.finished["1"]
    assert first_long.num_computed > 0


def test_priority_goes_first_and_is_preempted_last() -> None:
    world = World(pages=(16,), seqs=3, budget=64, ends=False)
    others = [world.add([i] * 8, 40) for i in range(3)]
    important = world.add([5] * 8, 40, priority=-1)
    world.step()
    assert important.slot >= 0 and others[2].slot < 0
    world.drain()
    assert important.num_preemptions == 0
    assert world.scheduler.num_preemptions > 0


def test_a_sequence_that_waits_for_the_host_is_not_run_ahead() -> None:
    world = World(depth=1)
    careful, other = world.add([1, 2, 3], 6, waits=True), world.add([3, 2, 1], 6)
    most_pending = {careful.id: 0, other.id: 0}
    while world.scheduler.has_work or world.launched:
        shares = world.scheduler.schedule()
        for share in shares:
            assert share.sequence is not careful or share.end <= len(careful.tokens)
        world.launched += [[(share, world.compute(share)) for share in shares]] if shares else []
        for sequence in (careful, other):
            most_pending[sequence.id] = max(most_pending[sequence.id], sequence.num_pending)
        if len(world.launched) > 1 or not shares:
            world.read(world.launched.pop(0))
    assert most_pending == {careful.id: 1, other.id: 2}


def test_abort_of_a_waiting_a_running_and_an_in_flight_sequence() -> None:
    world = World(seqs=2)
    a, b, c = (world.add([i] * 9, 20) for i in range(3))
    world.step()
    world.abort(a.id)
    world.abort(c.id)
    world.scheduler.check()
    world.drain()
    assert b.tokens == world.alone(b)
    assert world.kv.usage() == 0


def test_siblings_start_from_the_state_of_their_prompt() -> None:
    """Requests with the same prompt that come together, as for n > 1: one of them computes it."""
    world = World(groups=(FULL, STATE), pages=(60, 12), budget=64, depth=0, ends=False)
    family = [world.add([3] * 19, 5) for _ in range(4)]
    stranger, other = world.add([4] * 19, 5, salt="x"), world.add([3] * 19, 5, salt="x")
    world.step()
    assert [sequence.num_computed for sequence in family] == [16, 0, 0, 0]
    world.step()
    assert [sequence.num_computed for sequence in family] == [19] * 4
    assert [sequence.num_cached for sequence in family] == [0, 16, 16, 16]
    world.drain()
    assert (stranger.num_cached, other.num_cached) == (0, 0)
    for sequence in (*family, stranger, other):
        assert sequence.tokens == world.alone(sequence)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_prompt_that_is_cut_takes_one_step(max_tokens: int, depth: int) -> None:
    """And is found where it would have been found after two. A sibling waits for it, and needs a step more."""
    world = World(groups=(FULL, STATE), pages=(60, 12), budget=64, depth=depth, ends=False, cuts=True)
    first, second = (world.add([3] * 19, max_tokens) for _ in range(2))
    world.step()
    assert (first.num_computed, first.cut[0], second.num_computed) == (19, 16, 0)
    world.step()
    assert (second.num_computed, second.num_cached, second.cut) == (19, 16, ())
    world.drain()
    parted = world.add([3] * 13 + [4] * 10, max_tokens)  # leaves after 12 tokens, and has a state at 20
    world.step()
    assert (parted.num_cached, parted.num_computed, parted.cut[0]) == (0, 20, 12)
    world.drain()
    third = world.add([3] * 13 + [5] * 10, max_tokens)
    world.step()
    assert (third.num_cached, third.num_computed, third.cut[0]) == (12, 23, 20)
    world.drain()
    for sequence in (first, second, parted, third):
        assert sequence.tokens == world.alone(sequence)


@pytest.mark.parametrize("cuts", [False, True])
def test_a_preempted_sequence_resumes_from_a_state(cuts: bool) -> None:
    world = World(groups=(FULL, STATE), pages=(16, 6), seqs=4, budget=64, ends=False, cuts=cuts)
    sequences = [world.add([i] * 12, 30) for i in range(3)]
    world.drain()
    assert world.scheduler.num_preemptions > 0 and world.kv.num_hits > 0
    for sequence in sequences:
        assert sequence.tokens == world.alone(sequence)
