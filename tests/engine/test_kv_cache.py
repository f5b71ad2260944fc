"""The KV cache against a brute-force model of it, on random walks, and by worked examples.

The model is a dict from (salt, all tokens up to the end of a page) to that page's entry. It finds prefixes by trying
all lengths and picks what to evict by looking at everything, so it shares no bookkeeping with the tree.
"""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from anabranch.engine.kv_cache import KVCache
from anabranch.engine.radix_tree import Node
from anabranch.layers.cache import CacheGroup, CachePolicy, CacheSpec, KeepAll, KeepWindow, OneState

Key = tuple[str, tuple[int, ...]]


STATE = -1
"""Stands for a group with one state per request, where others give a window; 0: all tokens are kept."""


def group(window: int) -> CacheGroup:
    policy: CachePolicy = KeepAll() if window == 0 else OneState() if window == STATE else KeepWindow(window)
    return CacheGroup((0,), CacheSpec(((1, 8), (1, 8)), policy))


def make(*windows: int, num_pages: int = 12, page_size: int = 4, max_chunk: int = 16, **options: bool) -> KVCache:
    return KVCache([group(w) for w in windows], [num_pages] * len(windows), page_size, max_chunk=max_chunk, **options)


# -- the model ---------------------------------------------------------------------------------------------------------


class Entry:
    def __init__(self, num_groups: int) -> None:
        self.pages: list[int | None] = [None] * num_groups
        self.stamp = 0


class Request:
    def __init__(self, id: str, salt: str, tokens: list[int], tables: list[list[int | None]]) -> None:
        self.id, self.salt, self.tokens, self.tables = id, salt, tokens, tables
        self.path: list[Entry] | None = None
        """Entries it has been given or has inserted, as far as it knows; None: it no longer inserts."""
        self.num_computed = 0
        self.source: dict[int, int] = {}
        """Per group with states, the checkpoint it starts from, until it has a page of its own."""
        self.stops: list[int] = []
        self.cut = 0
        self.prompt_end = self.next_state = 0
        self.pending: tuple[int, list[int]] | None = None
        self.in_answer: Entry | None = None


class Model:
    def __init__(self, windows: Sequence[int], num_pages: Sequence[int], size: int, cuts: bool) -> None:
        self.windows, self.num_pages, self.size, self.cuts = windows, num_pages, size, cuts
        self.states = [g for g, window in enumerate(windows) if window == STATE]
        self.state_interval, self.answer_interval = 4 * size, 2 * size
        self.entries: dict[Key, Entry] = {}
        self.requests: dict[str, Request] = {}
        self.clock = 0
        self.seen: Counter[str] = Counter()
        """How often what happened, to see that a walk has been everywhere."""

    def key(self, salt: str, tokens: Sequence[int], count: int) -> Key:
        return salt, tuple(tokens[: count * self.size])

    def held(self, group: int) -> set[int]:
        return set(self.references(group))

    def references(self, group: int) -> list[int]:
        """Of requests, on pages of this group."""
        found = []
        for request in self.requests.values():
            found += [page for page in request.tables[group] if page is not None]
            found += [page for g, page in request.source.items() if g == group]
            found += [page for g, page in zip(self.states, request.pending[1]) if g == group] if request.pending else []
        return found

    def cached(self, group: int) -> set[int]:
        return {page for entry in self.entries.values() if (page := entry.pages[group]) is not None}

    def num_free(self, group: int) -> int:
        return self.num_pages[group] - len(self.held(group) | self.cached(group))

    def needed(self, count: int, window: int) -> set[int]:
        """Pages that the query after so many pages sees; the state after the last of them."""
        position = count * self.size
        if window == STATE:
            return {count - 1}
        return {t // self.size for t in range(max(0, position - window + 1) if window else 0, position)}

    def begin(self, id: str, salt: str, tokens: list[int], reuse: bool) -> Request:
        found: list[Entry] = []
        most = branch = (len(tokens) - 1) // self.size
        if reuse:
            branch = 0
        for count in range(1, most + 1 if reuse else 0):
            path = [self.entries.get(self.key(salt, tokens, i + 1)) for i in range(count)]
            whole = [entry for entry in path if entry is not None]
            if len(whole) < count:
                break
            holes = {g for g, w in enumerate(self.windows) for i in self.needed(count, w) if whole[i].pages[g] is None}
            if not holes:
                found = whole
            if holes.issubset(self.states):
                branch = count
        tables = [
            [
                entry.pages[g] if w != STATE and i in self.needed(len(found), w) else None
                for i, entry in enumerate(found)
            ]
            for g, w in enumerate(self.windows)
        ]
        request = self.requests[id] = Request(id, salt, tokens, tables)
        request.path = found
        request.num_computed = len(found) * self.size
        if self.states:
            request.source = {g: page for g in self.states if found and (page := found[-1].pages[g]) is not None}
            request.prompt_end = most * self.size
            request.stops = sorted(self.size * count for count in {most, branch} if count > len(found))
            self.seen["branch"] += len(request.stops) > 1
            self.plan(request, request.num_computed)
        self.touch(found)
        return request

    def plan(self, request: Request, num_kept: int) -> None:
        interval = self.state_interval if request.stops else self.answer_interval
        request.next_state = min([num_kept + interval, *request.stops])

    def chunk(self, request: Request, count: int) -> int:
        """How many of the next tokens can be computed before the state has to be copied, or kept for the second
        time."""
        stops, due = request.stops, request.next_state
        if self.cuts and stops and request.num_computed < stops[0] < request.num_computed + count:
            stops, due = stops[1:], min([stops[0] + self.state_interval, *stops[1:]])
        if self.states and stops:
            begin = request.num_computed
            ends = [end for end in range(begin + 1, begin + count + 1) if end <= stops[0]]
            at_page_ends = [end for end in ends if end % self.size == 0]
            if ends and ends[-1] >= due and at_page_ends:
                ends = at_page_ends
            count = ends[-1] - begin if ends else 1
        return count

    def cut(self, request: Request, end: int) -> bool:
        """Whether a step to `end` keeps the state on its way, with pages that are free then; `request.cut` says
        where."""
        request.cut = request.stops[0] if request.stops else 0
        if not self.cuts or not request.num_computed < request.cut < end:
            return False
        request.stops = [stop for stop in request.stops if stop > request.cut]
        self.plan(request, request.cut)
        return self.make_room(request)

    def touch(self, path: Sequence[Entry]) -> None:
        self.clock += 1
        for entry in path:
            entry.stamp = self.clock

    def grow(self, request: Request, num_tokens: int) -> int:
        """Logical pages it gets more, or −1."""
        need = max(0, -(-num_tokens // self.size) - len(request.tables[0]))
        needs = [
            int(need > 0 and all(page is None for page in table)) if w == STATE else need
            for w, table in zip(self.windows, request.tables)
        ]
        free = [self.num_pages[g] - len(self.held(g)) for g in range(len(needs))]
        taken = [g for g, page in request.source.items() if not free[g] and self.references(g).count(page) == 1]
        for g in taken:
            needs[g] = 0
        if any(free[g] < mine for g, mine in enumerate(needs)):
            return -1
        for g, mine in enumerate(needs):
            while self.num_free(g) < mine:
                self.evict(g)
            if g in taken:
                self.seen["taken"] += 1
                for entry in self.entries.values():
                    if entry.pages[g] == request.source[g]:
                        entry.pages[g] = None
                request.tables[g][0] = request.source.pop(g)
                self.sweep()
        return need

    def keep(self, request: Request) -> bool:
        """Whether it makes a checkpoint now, with pages that are free then."""
        computed = request.num_computed
        if not self.states or computed < request.next_state or computed % self.size:
            return False
        request.stops = [stop for stop in request.stops if stop > computed]
        self.plan(request, computed)
        assert request.path is not None
        key = self.key(request.salt, request.tokens, computed // self.size)
        if len(request.path) * self.size == computed and self.entries.get(key) is request.path[-1]:
            if all(request.path[-1].pages[g] is not None for g in self.states):
                self.seen["known"] += 1
                return False
        return self.make_room(request)

    def make_room(self, request: Request) -> bool:
        request.pending = None
        if any(len(self.held(g)) == self.num_pages[g] for g in self.states):
            self.seen["no room"] += 1
            return False
        for g in self.states:
            if not self.num_free(g):
                self.evict(g)
        return True

    def attach(self, request: Request) -> None:
        """A checkpoint whose tokens are all committed goes into the cache."""
        if request.pending is None or not request.path or self.alive(request) != request.path:
            return
        num_tokens, pages = request.pending
        if num_tokens > len(request.path) * self.size:
            self.seen["pending"] += 1
            return
        entry, request.pending = request.path[num_tokens // self.size - 1], None
        self.touch(request.path[: num_tokens // self.size])
        new = all(entry.pages[g] is None for g in self.states)
        self.seen["checkpoint"] += new
        for g, page in zip(self.states, pages):
            if entry.pages[g] is None:
                entry.pages[g] = page
        if new and num_tokens > request.prompt_end:
            earlier, request.in_answer = request.in_answer, entry
            for (salt, tokens), other in list(self.entries.items()):
                below = [k for s, k in self.entries if s == salt and k[: -self.size] == tokens and k]
                if other is earlier and len(below) == 1:
                    other.pages = [None if g in self.states else page for g, page in enumerate(other.pages)]
                    self.seen["replaced"] += 1

    def evict(self, group: int) -> None:
        held = self.held(group)
        unused = [k for k, e in self.entries.items() if e.pages[group] is not None and e.pages[group] not in held]
        if self.windows[group]:
            oldest = min(unused, key=lambda key: (self.entries[key].stamp, -len(key[1])))
            self.entries[oldest].pages[group] = None
            self.seen["hole"] += 1
            self.sweep()
            return
        parents = {(salt, tokens[: -self.size]) for salt, tokens in self.entries}
        leaves = [key for key in unused if key not in parents]
        if leaves:
            del self.entries[min(leaves, key=lambda key: (self.entries[key].stamp, -len(key[1])))]
            self.seen["leaf"] += 1
            return
        self.seen["copies"] += 1
        for salt, top in unused:
            for key in [k for k in self.entries if k[0] == salt and k[1][: len(top)] == top]:
                del self.entries[key]

    def sweep(self) -> None:
        """Bare leaves go, but those that a request stands on."""
        ends = [request.path[-1] for request in self.requests.values() if request.path]
        while True:
            parents = {(salt, tokens[: -self.size]) for salt, tokens in self.entries}
            bare = [
                key
                for key, entry in self.entries.items()
                if key not in parents and entry not in ends and all(page is None for page in entry.pages)
            ]
            if not bare:
                return
            for key in bare:
                del self.entries[key]
                self.seen["bare"] += 1

    def alive(self, request: Request) -> list[Entry]:
        path = list(request.path or [])
        while path and self.entries.get(self.key(request.salt, request.tokens, len(path))) is not path[-1]:
            path.pop()
        return path

    def commit(self, request: Request, num_computed: int) -> None:
        count = num_computed // self.size
        if request.path is None or count <= len(request.path):
            return
        path = self.alive(request)
        self.seen["dead"] += len(path) < len(request.path)
        new = []
        for i in range(len(path), count):
            key = self.key(request.salt, request.tokens, i + 1)
            known = key in self.entries
            entry = self.entries.setdefault(key, Entry(len(self.windows)))
            for g, table in enumerate(request.tables):
                if entry.pages[g] is None and g not in self.states:
                    entry.pages[g] = table[i]
                    self.seen["filled"] += known and table[i] is not None
            new.append(entry)
        self.touch(new)
        request.path = path + new
        self.attach(request)

    def slide(self, request: Request, num_computed: int) -> None:
        for g, window in enumerate(self.windows):
            if window > 0:
                for i in range(len(request.tables[g])):
                    if (i + 1) * self.size <= num_computed - window + 1:
                        request.tables[g][i] = None

    def release(self, request: Request) -> None:
        self.touch(self.alive(request))
        del self.requests[request.id]
        self.sweep()


# -- the real thing and the model, side by side ------------------------------------------------------------------------


class World:
    """Every call goes to both; all that can be seen must agree after each."""

    def __init__(
        self, windows: Sequence[int], num_pages: Sequence[int], size: int, max_chunk: int, cuts: bool = False
    ) -> None:
        self.model = Model(windows, num_pages, size, cuts)
        interval = self.model.state_interval
        groups = [group(w) for w in windows]
        self.kv = KVCache(groups, num_pages, size, max_chunk=max_chunk, state_interval=interval, cuts=cuts)
        self.kv.answer_interval = self.model.answer_interval
        self.size = size
        self.content: dict[tuple[int, int], Key] = {}
        """What was written to (group, page) last: the salt and all tokens up to the last one in the page."""
        self.num_operations = self.num_begun = 0

    @property
    def requests(self) -> list[Request]:
        return list(self.model.requests.values())

    def begin(self, tokens: list[int], salt: str, reuse: bool = True) -> Request:
        id = f"r{self.num_begun}"
        self.num_begun += 1
        found = self.kv.begin(id, tokens, salt, reuse)
        request = self.model.begin(id, salt, tokens, reuse)
        assert found == request.num_computed < len(tokens) and found % self.size == 0
        for g, page in request.source.items():
            assert self.content[g, page] == self.model.key(salt, tokens, found // self.size), "a state of other tokens"
        for g, table in enumerate(request.tables):
            for i, page in enumerate(table):
                if page is not None:
                    assert self.content[g, page] == self.model.key(salt, tokens, i + 1), "a page of other tokens"
        self.model.seen["found"] += found > 0
        self.verify()
        return request

    def grow(self, request: Request, num_tokens: int) -> bool:
        need = self.model.grow(request, num_tokens)
        grown = self.kv.grow(request.id, num_tokens)
        assert grown == (need >= 0)
        self.take(request, need)
        self.copy()
        if not grown and len(self.requests) == 1:
            assert not self.kv.fits(num_tokens), "alone, and yet refused what should fit"
        self.verify()
        return grown

    def take(self, request: Request, need: int) -> None:
        """Write down the pages it got; −1: it was refused."""
        self.model.seen["refused"] += need < 0
        for g, table in enumerate(self.kv.pages(request.id)):
            new = table[len(request.tables[g]) :]
            assert len(new) == max(0, need)
            if self.model.windows[g] == STATE:  # only the first is a page
                if need > 0 and g in request.source:
                    assert table[0] not in self.model.cached(g) | self.model.held(g)
                    request.tables[g][0] = table[0]
                    del request.source[g]
                first = len(request.tables[g]) == 0
                assert not any(new[first:])
                new = [*new[:first], *[None] * len(new[first:])]
            assert not self.model.held(g) & {page for page in new if page is not None}, "a page that somebody holds"
            request.tables[g] += new

    def commit_slide_grow(self, request: Request, chunk: int, lag: int) -> bool:
        """The same as three calls, and a chunk as long as the sliding groups allow."""
        begin, model = request.num_computed, self.model
        known = request.tokens[: len(request.tokens) - lag]
        count = min(len(request.tokens) - begin, chunk)
        given = self.kv.advance(request.id, known, begin, count)
        model.commit(request, min(begin, len(known)))
        model.slide(request, begin)
        if model.keep(request):
            made, self.kv.copies[: len(model.states)] = self.kv.copies[: len(model.states)], []
            assert [(g, source) for g, source, _ in made] == [(g, request.tables[g][0]) for g in model.states]
            for g, source, page in made:
                assert page not in model.held(g) | model.cached(g)
                self.content[g, page] = self.content[g, source]
            request.pending = begin, [page for _, _, page in made]
            model.attach(request)
        room = [
            model.num_pages[g] - len(model.held(g)) + len(request.tables[g])
            for g, w in enumerate(model.windows)
            if w > 0
        ]
        count = max(1, model.chunk(request, min([count, *(pages * self.size - begin for pages in room)])))
        need = model.grow(request, begin + count)
        assert given == (count if need >= 0 else 0)
        self.take(request, need)
        self.copy()
        self.verify()
        if given:
            self.cut(request, begin + given)
            self.compute(request, begin + given)
        return given > 0

    def cut(self, request: Request, end: int) -> None:
        model, found = self.model, self.kv.cut(request.id, request.num_computed, end)
        assert bool(found) == model.cut(request, end)
        if found:
            at, *pages = found
            assert at == request.cut > request.num_computed and at % self.size == 0
            for g, page in zip(model.states, pages, strict=True):
                assert page not in model.held(g) | model.cached(g)
                self.content[g, page] = request.salt, tuple(request.tokens[:at])
            request.pending = at, pages
            model.seen["cut"] += 1
            self.verify()

    def copy(self) -> None:
        for g, source, target in self.kv.copies:
            self.content[g, target] = self.content[g, source]
        self.kv.copies.clear()

    def compute(self, request: Request, num_tokens: int) -> None:
        """Write keys and values of the tokens up to here: into pages that nobody else reads."""
        for g, table in enumerate(request.tables):
            begin, end = request.num_computed // self.size, -(-num_tokens // self.size)
            for i in range(1) if self.model.windows[g] == STATE else range(begin, end):
                page = table[i]
                assert page is not None and self.kv.pools[g].counts[page] == 1, "a write to a shared page"
                end = min(num_tokens, (i + 1) * self.size)
                if self.model.windows[g] == STATE:
                    end, before = num_tokens, (request.salt, tuple(request.tokens[: request.num_computed]))
                    assert not request.num_computed or self.content[g, page] == before, "a state of other tokens"
                self.content[g, page] = request.salt, tuple(request.tokens[:end])
        request.num_computed = num_tokens

    def commit(self, request: Request, num_computed: int) -> None:
        self.kv.commit(request.id, request.tokens, num_computed)
        self.model.commit(request, num_computed)
        self.verify()

    def slide(self, request: Request) -> None:
        self.kv.slide(request.id, request.num_computed)
        self.model.slide(request, request.num_computed)
        self.verify()

    def release(self, request: Request) -> None:
        self.kv.release(request.id)
        self.model.release(request)
        self.verify()

    def advance(self, request: Request, chunk: int, lag: int, slide_first: bool) -> bool:
        """One step of a request; `lag`: newest tokens that the host does not know yet. False: it gets no pages."""
        end = min(len(request.tokens), request.num_computed + chunk)
        if not self.grow(request, end):
            return False
        self.compute(request, end)
        if slide_first:
            self.slide(request)
        self.commit(request, max(0, end - lag))
        if not slide_first:
            self.slide(request)
        return True

    def end(self) -> None:
        for request in self.requests:
            self.release(request)
        assert self.kv.usage() == 0 and self.kv.num_free == list(self.model.num_pages)
        for pool, cached in zip(self.kv.pools, self.kv.tree.num_cached):
            assert pool.num_free + cached == pool.num_pages, "a page has leaked"

    def verify(self) -> None:
        self.num_operations += 1
        self.kv.check()
        tree: dict[Key, list[int | None]] = {}
        for salt, root in self.kv.tree.roots.items():
            below: list[tuple[tuple[int, ...], Node]] = [((), root)]
            for tokens, node in below:  # which grows meanwhile
                if node is not root:
                    tree[salt, tokens] = node.pages
                below += [(tokens + key, child) for key, child in node.children.items()]  # type: ignore[operator]
        assert tree == {key: entry.pages for key, entry in self.model.entries.items()}
        for key, pages in tree.items():
            for g, page in enumerate(pages):
                assert page is None or self.content[g, page] == key
        for request in self.requests:
            for table, expected in zip(self.kv.pages(request.id), request.tables):
                assert table == [page or 0 for page in expected]


# -- random walks ------------------------------------------------------------------------------------------------------


def walk(world: World, rng: random.Random, num_operations: int, max_pages: int) -> None:
    size = world.size
    stems = [[rng.randrange(2) for _ in range(max_pages * size)] for _ in range(3)]
    stems.append(stems[0][: max_pages * size // 2] + stems[1])

    def new_request() -> None:
        stem = rng.choice(stems)
        tail = [rng.randrange(2) for _ in range(rng.choice((0, 0, 1, 2 * size)))]
        tokens = (stem[: rng.randint(1, max_pages * size)] + tail)[: max_pages * size]
        if world.kv.fits(len(tokens)):
            world.begin(tokens, rng.choice(("", "", "salt")), reuse=rng.random() > 0.1)

    while world.num_operations < num_operations:
        choice = rng.random()
        if (choice < 0.2 and len(world.requests) < 8) or not world.requests:
            new_request()
        elif choice < 0.3:
            world.release(rng.choice(world.requests))
        else:
            request = rng.choice(world.requests)
            if request.num_computed == len(request.tokens):
                full = len(request.tokens) >= 2 * max_pages * size or not world.kv.fits(len(request.tokens) + 1)
                if full or rng.random() < 0.02:
                    world.release(request)
                    continue
                request.tokens.append(0 if rng.random() < 0.9 else 1)
            chunk = rng.choice((1, size, rng.randint(1, world.kv.max_chunk)))
            lag = rng.choice((0, 0, 1, size + 1))
            if rng.random() < (0.8 if world.model.states else 0.3):
                given = world.commit_slide_grow(request, chunk, min(lag, len(request.tokens)))
            else:
                given = world.advance(request, chunk, lag, slide_first=rng.random() < 0.2)
            if not given:
                world.release(rng.choice(world.requests))
    world.end()


SHAPES = {
    "full": ((0,), (24,)),
    "full and sliding": ((0, 7), (26, 20)),
    "sliding": ((5,), (10,)),
    "two full, two sliding": ((4, 0, 0, 20), (14, 22, 26, 18)),
    "full and state": ((0, STATE), (26, 6)),
    "state, sliding and full": ((STATE, 7, 0), (6, 20, 26)),
    "full and two states": ((STATE, 0, STATE), (6, 22, 7)),
    "state": ((STATE,), (5,)),
}


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize(
    ("shape", "cuts"), [*((shape, False) for shape in SHAPES), *((shape, True) for shape in SHAPES if "state" in shape)]
)
def test_random_walk(shape: str, cuts: bool, size: int, thorough: bool) -> None:
    windows, num_pages = SHAPES[shape]
    if size == 16:
        windows = tuple(5 * window if window > 0 else window for window in windows)
    num_operations = int(os.environ.get("ANABRANCH_TEST_WALK", 8_500 if thorough else 2_500))
    world = World(windows, num_pages, size, max_chunk=3 * size, cuts=cuts)
    walk(world, random.Random(f"{shape} {size}"), num_operations, max_pages=10)
    assert world.num_operations >= num_operations
    events = {"refused", "found"} | ({"leaf", "copies", "dead"} if 0 in windows else {"bare"})
    events |= {"hole"} if any(windows) else set()
    events |= {"filled"} if any(window > 0 for window in windows) else set()
    if STATE in windows:
        events |= {"checkpoint", "branch", "pending", "taken", "no room"}
        events |= {"replaced"} if size < 16 else set()  # few answers get that long
        events |= {"cut"} if cuts else set()
    seen = {event for event, count in world.model.seen.items() if count}
    assert events <= seen <= events | {"replaced", "known"}, "the walk has been everywhere"


class Machine(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(sorted(SHAPES)), size=st.sampled_from((1, 2, 3)), pages=st.integers(4, 9))
    def start(self, shape: str, size: int, pages: int) -> None:
        windows, _ = SHAPES[shape]
        self.world = World(
            windows, [4 if w == STATE else pages + 6 * (w > 0) for w in windows], size, max_chunk=2 * size
        )

    def pick(self, index: int) -> Request | None:
        requests = self.world.requests
        return requests[index % len(requests)] if requests else None

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(("", "s")),
        reuse=st.booleans(),
    )
    def begin(self, tokens: list[int], salt: str, reuse: bool) -> None:
        if self.world.kv.fits(len(tokens)) and len(self.world.requests) < 4:
            self.world.begin(tokens, salt, reuse)

    @rule(index=st.integers(0, 3), chunk=st.integers(1, 6), lag=st.integers(0, 2), slide_first=st.booleans())
    def advance(self, index: int, chunk: int, lag: int, slide_first: bool) -> None:
        if (request := self.pick(index)) is not None:
            if request.num_computed == len(request.tokens):
                request.tokens.append(0)
            chunk = min(chunk, self.world.kv.max_chunk)
            if self.world.model.states and slide_first:
                given = self.world.commit_slide_grow(request, chunk, min(lag, len(request.tokens)))
            else:
                given = self.world.advance(request, chunk, lag, slide_first)
            if not given:
                self.world.release(self.world.requests[-1])

    @rule(index=st.integers(0, 3))
    def release(self, index: int) -> None:
        if (request := self.pick(index)) is not None:
            self.world.release(request)

    @invariant()
    def usage_is_a_share(self) -> None:
        if hasattr(self, "world"):
            assert 0 <= self.world.kv.usage() <= 1

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- worked examples ---------------------------------------------------------------------------------------------------


def run(kv: KVCache, id: str, tokens: Sequence[int], salt: str = "", reuse: bool = True) -> int:
    """From begin to the last token computed, in one chunk."""
    found = kv.begin(id, tokens, salt, reuse)
    assert kv.grow(id, len(tokens))
    kv.commit(id, tokens, len(tokens))
    kv.slide(id, len(tokens))
    kv.check()
    return found


def test_the_example_of_the_docstring() -> None:
    kv = make(0, 6)
    tokens = list(range(10))
    run(kv, "a", tokens[:8])
    assert kv.begin("b", tokens) == 8
    shared = [list(table) for table in kv.pages("a")]
    assert kv.pages("b") == shared and all(len(table) == 2 for table in shared)
    tables = kv.pages("b")
    assert kv.grow("b", 10)
    assert kv.pages("b") is tables
    assert [table[:2] for table in tables] == shared and [len(table) for table in tables] == [3, 3]
    kv.commit("b", tokens, 10)
    kv.slide("b", 10)
    assert tables == [[*shared[0], tables[0][2]], [0, shared[1][1], tables[1][2]]]
    kv.check()


def test_the_last_token_is_always_computed() -> None:
    kv = make(0)
    tokens = list(range(12))
    run(kv, "a", tokens)
    for length in range(1, 13):
        assert kv.begin("b", tokens[:length]) == (length - 1) // 4 * 4
        kv.release("b")
    assert kv.begin("b", [*tokens, 99]) == 12


def test_a_prefix_that_ends_inside_a_page_shares_whole_pages_only() -> None:
    kv = make(0)
    run(kv, "a", range(11))
    assert run(kv, "b", [*range(10), 99, 98, 97]) == 8
    a, b = kv.pages("a")[0], kv.pages("b")[0]
    assert a[:2] == b[:2] and not set(a[2:]) & set(b[2:])


def test_pages_of_unknown_or_uncomputed_tokens_are_not_shared() -> None:
    kv = make(0)
    tokens = list(range(16))
    kv.begin("a", tokens)
    assert kv.grow("a", 16)
    kv.commit("a", tokens, 7)
    assert kv.begin("b", tokens) == 4
    kv.commit("a", tokens, 16)
    kv.commit("a", tokens, 16)
    assert kv.tree.num_cached == [4]
    kv.release("b")
    assert kv.begin("b", tokens) == 12


def test_salt_and_reuse() -> None:
    kv = make(0, num_pages=16)
    tokens = list(range(9))
    run(kv, "a", tokens, "mine")
    assert run(kv, "b", tokens, "yours") == 0
    assert run(kv, "c", tokens, "mine", reuse=False) == 0
    assert run(kv, "d", tokens, "mine") == 8
    assert (kv.num_queries, kv.num_hits) == (27, 8)


def test_a_lookup_counts_once_although_refused_before() -> None:
    kv = make(0, num_pages=4)
    run(kv, "a", range(8))
    for _ in range(3):
        kv.begin("b", range(20))
        assert not kv.grow("b", 20)
        kv.release("b")
    assert (kv.num_queries, kv.num_hits) == (8, 0)
    assert run(kv, "c", range(12)) == 8
    assert kv.grow("c", 13)
    assert (kv.num_queries, kv.num_hits) == (20, 8)


def test_without_prefix_cache_nothing_stays() -> None:
    kv = make(0, 6, prefix_cache=False)
    for id in ("a", "b"):
        assert run(kv, id, range(12)) == 0
    assert kv.tree.num_cached == [0, 0] and kv.num_queries == 0
    kv.release("a")
    kv.release("b")
    assert [pool.num_free for pool in kv.pools] == [12, 12]


def test_refused_growth_changes_nothing() -> None:
    kv = make(0, 6, num_pages=5)
    run(kv, "old", range(8))
    kv.release("old")
    run(kv, "a", [9] * 12)
    before, cached = [list(table) for table in kv.pages("a")], kv.tree.num_cached
    assert not kv.grow("a", 24)
    assert kv.pages("a") == before and kv.tree.num_cached == cached
    assert kv.grow("a", 20)
    assert kv.num_free == [0, 1]  # behind the window there was one page less
    kv.check()


def test_usage_counts_what_requests_hold() -> None:
    kv = make(0, 6)
    run(kv, "a", range(36))
    assert kv.tree.num_cached == [9, 9]
    assert kv.usage() == 9 / 12 and kv.num_free == [3, 10]
    kv.release("a")
    assert kv.usage() == 0 and kv.num_free == [12, 12] and kv.tree.num_cached == [9, 9]


def test_a_running_request_gives_back_what_is_behind_its_window() -> None:
    kv = make(6, num_pages=3, max_chunk=1)
    tokens: list[int] = [7]
    kv.begin("a", tokens)
    for length in range(1, 200):
        assert kv.grow("a", length)
        kv.commit("a", tokens, length)
        kv.slide("a", length)
        kept = [i for i, page in enumerate(kv.pages("a")[0]) if i >= kv._requests["a"].firsts[0]]
        assert kept == sorted({t // 4 for t in range(max(0, length - 5), length)})
        kv.check()
        tokens.append(length % 3)
    assert kv.fits(10**6)


def test_a_chunk_is_cut_to_what_the_sliding_groups_have() -> None:
    kv = KVCache([group(0), group(6)], [20, 4], 4, max_chunk=16)
    tokens = list(range(40))
    kv.begin("a", tokens)
    ends, end = [], 0
    while end < 40:
        given = kv.advance("a", tokens, end, min(16, 40 - end))
        end += given
        ends.append(end)
        kv.check()
    # Of the 4 pages the window keeps 2, and 3 where it begins inside one; a started page has room for the rest.
    assert ends == [16, 24, 32, 40]
    assert kv.begin("b", [99] * 4) == 0
    assert kv.advance("b", [99] * 4, 0, 4) == 0  # not a page is left
    kv.slide("a", 40)
    assert kv.advance("b", [99] * 4, 0, 4) == 4


def test_two_with_the_same_prompt_leave_room_for_the_one_that_stays() -> None:
    """Both compute the prompt; the first one's pages are in the tree, the second one's nodes hang below them. When the
    first has ended its copies must not stand in the second's way."""
    kv = make(0, num_pages=8)
    prompt = list(range(12))
    for id in ("a", "b"):
        kv.begin(id, prompt)
        assert kv.grow(id, 12)
    for id in ("a", "b"):
        kv.commit(id, prompt, 12)
    kv.release("a")
    tokens = prompt + [5] * 20
    for length in range(13, 33):
        assert kv.grow("b", length), length
        kv.commit("b", tokens, length)
        kv.check()
    assert kv.fits(32) and not kv.fits(33)
    kv.release("b")
    assert kv.begin("c", [*tokens, 1]) == 32


def test_a_state_is_one_page_for_the_life_of_a_request() -> None:
    kv = KVCache([group(0), group(STATE)], [12, 2], 4, prefix_cache=False, max_chunk=16)
    assert run(kv, "a", range(10)) == 0
    full, state = kv.pages("a")
    page = state[0]
    assert len(set(full)) == 3 and state == [page, 0, 0] and kv.num_free == [9, 1]
    assert kv.grow("a", 13) and state == [page, 0, 0, 0] and kv.num_free == [8, 1]
    run(kv, "b", range(10))
    assert not kv.grow("b", 100) and kv.num_free[1] == 0
    kv.begin("c", [1])
    assert not kv.grow("c", 1), "there is no state left"
    kv.release("c")
    kv.release("a")
    assert kv.tree.num_cached == [0, 0] and run(kv, "a", range(10)) == 0, "it begins again, without a prefix"
    assert kv.pages("a")[1][0] == page and kv.fits(48) and not kv.fits(49)


# -- states ------------------------------------------------------------------------------------------------------------


def with_states(num_states: int = 8, **options: int) -> KVCache:
    return KVCache([group(0), group(STATE)], [64, num_states], 4, max_chunk=64, **options)


def chunks(kv: KVCache, id: str, tokens: Sequence[int], chunk: int = 64, end: int | None = None) -> list[int]:
    """Run it as a scheduler does, up to `end` tokens; the lengths at which it starts and its chunks end."""
    ends = [kv.begin(id, tokens)]
    while ends[-1] < (end or len(tokens)):
        given = kv.advance(id, tokens, ends[-1], min(chunk, len(tokens) - ends[-1]))
        assert given
        kv.check()
        ends.append(ends[-1] + given)
    kv.commit(id, tokens, ends[-1])
    return ends


def states(kv: KVCache) -> set[int]:
    """The lengths of all checkpoints."""
    return {node.depth * kv.page_size for node in kv.tree.nodes() if node.pages[1] is not None}


def test_a_prompt_is_found_again_where_its_last_whole_page_ends() -> None:
    kv = with_states()
    for length, ends in ((20, [0, 16, 20]), (21, [16, 20, 21]), (3, [0, 3]), (5, [0, 4, 5])):
        assert chunks(kv, "a", range(length)) == ends
        kv.release("a")
        again = chunks(kv, "b", range(length))
        assert again == ends[-2:] and kv.tree.num_cached[1] == len(states(kv))
        kv.release("b")
    assert states(kv) == {16, 20, 4}
    assert (kv.num_queries, kv.num_hits) == (98, 2 * 16 + 20 + 4)


def test_a_request_gets_a_copy_of_the_checkpoint() -> None:
    kv = with_states()
    chunks(kv, "a", range(10))
    own = kv.pages("a")[1][0]
    ((group_, source, checkpoint),) = kv.copies
    assert (group_, source) == (1, own) != (1, checkpoint)
    kv.copies.clear()
    assert kv.begin("b", range(10)) == 8 and kv.num_free[1] == 6, "it holds the checkpoint"
    assert kv.grow("b", 10) and kv.num_free[1] == 6
    assert kv.copies == [(1, checkpoint, kv.pages("b")[1][0])] and kv.pages("b")[1][0] not in (own, checkpoint)
    assert kv.pages("b")[0][:2] == kv.pages("a")[0][:2]


def test_the_last_page_of_states_is_taken_over() -> None:
    """A pool of one state serves requests one after another, and each starts from what the last one left."""
    kv = with_states(num_states=1)
    for _ in range(2):
        chunks(kv, "a", range(10))
        kv.release("a")
    assert states(kv) == set(), "while it ran there was no page for a checkpoint"
    kv = with_states(num_states=2)
    chunks(kv, "a", range(10))
    checkpoint = kv.copies.pop()[2]
    other = [*range(10)]
    assert chunks(kv, "b", other) == [8, 10] and kv.copies == [] and kv.pages("b")[1][0] == checkpoint
    assert states(kv) == set()
    kv.release("a")
    assert chunks(kv, "c", other) == [0, 8, 10], "there was no state to start from, and now there is a page for one"
    kv.release("b")
    assert kv.begin("d", other) == 0


def test_where_prompts_part_a_state_is_kept_for_the_third() -> None:
    kv = with_states()
    stem = list(range(12))
    assert chunks(kv, "a", [*stem, *[50] * 9]) == [0, 20, 21]
    assert chunks(kv, "b", [*stem, *[60] * 9]) == [0, 12, 20, 21]
    assert chunks(kv, "c", [*stem, *[70] * 9]) == [12, 20, 21]
    assert states(kv) == {12, 20} and kv.tree.num_cached[1] == 4


def test_a_chunk_goes_on_where_a_step_can_keep_a_state() -> None:
    kv = with_states(cuts=True)
    assert kv.begin("a", range(21)) == 0 and kv.advance("a", range(21), 0, 21) == 21
    at, page = kv.cut("a", 0, 21)
    assert at == 20 and page != kv.pages("a")[1][0] and not kv.copies and not states(kv) and not kv.has_stops("a")
    kv.check()
    kv.commit("a", range(21), 21)
    assert states(kv) == {20} and kv.begin("b", range(21)) == 20
    kv.check()
    # Where it leaves the others and where it ends: the chunk passes one of them.
    tokens = [*range(12), *[50] * 9]
    assert kv.begin("c", tokens) == 0 and kv.advance("c", tokens, 0, 21) == 20 and kv.cut("c", 0, 20)[0] == 12
    assert kv.has_stops("c") and kv.advance("c", tokens, 20, 1) == 1 and kv.cut("c", 20, 21) == ()
    assert states(kv) == {12, 20} and kv.tree.num_cached[1] == 3


def test_a_step_keeps_no_state_where_there_is_no_page() -> None:
    kv = with_states(num_states=1, cuts=True)
    assert kv.begin("a", range(21)) == 0 and kv.advance("a", range(21), 0, 21) == 21
    assert kv.cut("a", 0, 21) == () and not kv.has_stops("a")
    kv.check()


def test_long_prompts_have_states_in_between_where_chunks_end() -> None:
    kv = with_states(state_interval=10)
    assert chunks(kv, "a", range(50), chunk=7) == [0, 7, 12, 19, 24, 31, 36, 43, 48, 50]
    assert states(kv) == {12, 24, 36, 48}


def test_an_answer_keeps_its_latest_state() -> None:
    kv = with_states()
    kv.answer_interval = 8
    tokens = [*range(40)]
    kv.begin("a", tokens[:6])
    seen, computed = [], 0
    for known in range(6, 40):  # two tokens are not known yet when the next is computed
        while computed < known:
            computed += kv.advance("a", tokens[: max(6, known - 2)], computed, known - computed)
            kv.check()
        seen.append(sorted(states(kv)))
    assert seen[0] == [4] and [4, 12] in seen and seen[-1] == [4, 36]
    assert max(map(len, seen)) == 2
    kv.release("a")
    assert kv.begin("b", tokens) == 36


def test_states_go_with_their_pages_and_before_them() -> None:
    kv = KVCache([group(0), group(STATE)], [12, 3], 4, max_chunk=64)
    for i in range(3):
        chunks(kv, "a", [i] * 10)
        kv.release("a")
    assert kv.tree.num_cached == [6, 2], "one state is the request's: the oldest checkpoint went"
    assert kv.begin("b", [0] * 10) == 0, "its keys and values are there, but no state"
    kv.release("b")
    chunks(kv, "c", [9] * 48)
    assert kv.tree.num_cached[1] == 1 and states(kv) == {44}, "evicted with their nodes"


def test_a_checkpoint_whose_tokens_never_come_is_given_back() -> None:
    kv = with_states()
    kv.answer_interval = 4
    tokens = [*range(8)]
    kv.begin("a", tokens[:4])
    assert kv.advance("a", tokens[:4], 0, 4) == 4
    assert kv.advance("a", tokens[:4], 4, 1) == 1 and states(kv) == {4}
    kv.commit("a", tokens[:5], 5)
    assert kv.grow("a", 8) and kv.advance("a", tokens[:6], 8, 1) == 1
    kv.check()
    assert kv.num_free[1] == 6 and kv.tree.num_cached[1] == 1  # the request's own and the pending one are held
    kv.release("a")
    assert kv.num_free[1] == 8 and states(kv) == {4}


@pytest.mark.parametrize("window", [0, 1, 2, 3, 5, 9, STATE])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_fits_is_the_worst_moment_of_any_run(window: int, size: int) -> None:
    for max_chunk in (1, 2, 5, 8):
        worst = 0
        for num_tokens in range(1, 30):
            for chunk in range(1, min(max_chunk, num_tokens) + 1):
                begin = num_tokens - chunk
                seen = range(max(0, begin - window + 1) if window > 0 else 0, num_tokens)
                worst = 1 if window == STATE else max(worst, len({t // size for t in seen}))
            for num_pages, enough in ((worst, True), (worst - 1, False)):
                if num_pages:
                    kv = make(window, num_pages=num_pages, page_size=size, max_chunk=max_chunk)
                    assert kv.fits(num_tokens) is enough


def test_needs_no_torch() -> None:
    code = "import sys, anabranch.engine.kv_cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


@pytest.mark.parametrize("damage", ["count", "pin", "table", "node"])
def test_check_sees_damage(damage: str) -> None:
    kv = make(0, 6)
    run(kv, "a", range(16))
    kv.check()
    request = kv._requests["a"]
    assert request.node is not None
    if damage == "count":
        kv.pools[0].share(kv.pages("a")[0][0])
    elif damage == "pin":
        request.node.pins += 1
    elif damage == "table":
        kv.pages("a")[1][0] = 3
    else:
        request.node = request.node.parent
    with pytest.raises(AssertionError):
        kv.check()


@pytest.mark.parametrize("damage", ["source", "pending", "own"])
def test_check_sees_damaged_states(damage: str) -> None:
    kv = with_states()
    chunks(kv, "a", range(10))
    kv.begin("b", range(10))
    kv.check()
    if damage == "source":
        kv._requests["b"].source.clear()
    elif damage == "pending":
        kv._requests["a"].pending = 8, [5]
    else:
        kv.pages("a")[1][0] = 7
    with pytest.raises(AssertionError):
        kv.check()
