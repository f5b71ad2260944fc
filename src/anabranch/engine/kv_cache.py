"""Which pages each request has, in every cache group, shared with others as far as prefixes agree.

Ints alone, no tensors; how long a group needs a page is its policy's to say (layers/cache). A running request costs
three comparisons a step, until a page fills up. Its life: begin → (grow → compute → commit → slide)* → release. Commit
before slide, or pages are given back without having been cached.

Worked example, pages of 4 tokens, a group that keeps all and one with a window of 6. A request of 10 tokens, of which
the tree knows the first 8, begins with 8 tokens and pages [[7, 2], [3, 5]]. grow(10) makes it [[7, 2, 9], [3, 5, 1]].
After 10 tokens the next query, at position 10, sees 5 .. 10: slide gives back the second group's first page and leaves
[[7, 2, 9], [0, 5, 1]]. A third group with one state per request would have [4, 0, 0] all the time.

States change with every token, so requests share copies of them, checkpoints in the tree: where a prompt's last whole
page ends, where it leaves what others have computed, every `state_interval` tokens of a long one, and one in an answer.
These are ends of pages, and chunks end there (`largest_chunk`): a state can be copied between two steps only. Where
steps can store a state on their way (`cuts`), a chunk goes on beyond one such place (`cut`). `copies` lists what is to
be copied before the next step, in this order. A request that starts from a checkpoint gets a copy of it, or the page
itself if there is no other. Checkpoints take pages that no request wants, and evict older ones.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import gt

from anabranch.engine.pages import PagePool
from anabranch.engine.radix_tree import Node, RadixTree
from anabranch.layers.cache import NEVER, CacheGroup

ANSWER_INTERVAL = 256
"""Tokens of an answer after which its checkpoint is replaced by a later one: the next turn of a conversation computes
at most as many again, and the copy costs less than a hundredth of what the tokens cost."""


@dataclass(slots=True)
class _Tables:
    """The pages of one request. All its tables are equally long."""

    tables: list[list[int]]
    firsts: list[int]
    """Per group, the first page it still has: it has all from there on that exist in this group."""
    capacity: int
    """Tokens that have pages."""
    next_slide: int
    """Computed tokens with which the next page can be given back."""
    lookup: tuple[int, int] = 0, 0
    """Tokens it looked up and found, until counted: a request that gets no first page begins again later."""
    next_commit: int = NEVER
    """Computed tokens that fill the next page for the tree."""
    root: Node | None = None
    """None: it has no part in the prefix cache."""
    node: Node | None = None
    """How far it has committed: as many pages as the node is deep. May be dead."""
    source: dict[int, int] = field(default_factory=dict)
    """Until it has states of its own: per group, the checkpoint it starts from, which it holds."""
    stops: list[int] = field(default_factory=list)
    """Lengths at which a chunk of its prompt has to end for a checkpoint, the next one last."""
    prompt_end: int = 0
    """The last of these."""
    next_state: int = NEVER
    """Computed tokens from which on a checkpoint is made, where a page ends."""
    pending: tuple[int, list[int]] | None = None
    """A checkpoint of this many tokens, not all of which are known and committed: per group with states, its page."""
    in_answer: Node | None = None
    """Where it has put the latest checkpoint of its answer. May be dead."""


class KVCache:
    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        page_size: int,
        prefix_cache: bool = True,
        *,
        max_chunk: int,
        state_interval: int = NEVER,
        num_ahead: int = 0,
        cuts: bool = False,
    ) -> None:
        """`num_pages` has one number a group; `max_chunk` is the most tokens of one request computed in one step;
        `state_interval`: tokens of a prompt after which a checkpoint is made where a chunk ends; `num_ahead`: further
        tokens for which a request has pages, as far as it may become `longest`; `cuts`: see `cut`."""
        assert len(groups) == len(num_pages) > 0 and page_size > 0 and max_chunk > 0
        self.page_size = page_size
        self.policies = [group.policy for group in groups]
        self.prefix_cache = prefix_cache
        self.max_chunk = max_chunk
        self.state_interval = state_interval
        self.num_ahead = num_ahead
        self.cuts = cuts
        self.longest = NEVER
        """Tokens that a request may have."""
        self.answer_interval = ANSWER_INTERVAL
        self.pools = [PagePool(n) for n in num_pages]
        self.tree = RadixTree(self.pools, self.policies, page_size)
        self.shares_states = prefix_cache and bool(self.tree.states)
        self.num_queries = 0
        """Tokens looked up in the tree, by requests that then got the pages to run."""
        self.num_hits = 0
        """Those of them that were found."""
        self.copies: list[tuple[int, int, int]] = []
        """(group, source page, target page) of states, in order, until taken by who copies them."""
        self._requests: dict[str, _Tables] = {}

    # The life of a request.

    def begin(self, id: str, tokens: Sequence[int], salt: str = "", reuse: bool = True) -> int:
        """Start a request with the pages of the longest cached prefix; returns how many tokens these hold: whole pages,
        but never all tokens, because the last must be computed to sample the next."""
        assert id not in self._requests, f"request {id} has begun already"
        assert tokens
        tree, size = self.tree, self.page_size
        path: list[Node] = []
        most = num_paged = (len(tokens) - 1) // size
        if reuse and self.prefix_cache:
            path, num_paged = tree.match(tokens, salt, most)
        found = len(path) * size
        firsts = [policy.first_page(found, size) for policy in self.policies]
        for group in tree.states:
            firsts[group] = len(path)
        tables: list[list[int]] = []
        for group, first in enumerate(firsts):
            table = [0] * first
            for node in path[first:]:
                page = node.pages[group]
                assert page is not None
                tree.share(group, page)
                table.append(page)
            tables.append(table)
        request = self._requests[id] = _Tables(tables, firsts, found, self._next_slide(firsts))
        if self.prefix_cache:
            if reuse:
                request.lookup = len(tokens), found
            if path:
                tree.touch(path[-1])
            request.root, request.node = tree.enter(salt, path[-1] if path else None)
            request.next_commit = found + size
            if self.shares_states:
                request.stops = [pages * size for pages in sorted({most, num_paged}, reverse=True) if pages > len(path)]
                request.prompt_end = most * size
                self._plan_state(request, found)
                for group in tree.states if path else ():
                    page = path[-1].pages[group]
                    assert page is not None
                    tree.share(group, page)
                    request.source[group] = page
        return found

    def grow(self, id: str, num_tokens: int) -> bool:
        """Allocate pages for its first `num_tokens` tokens, evicting unused ones if need be. False, and no change, if
        there are not enough."""
        request = self._requests[id]
        if self.num_ahead:
            num_tokens = max(num_tokens, min(num_tokens + self.num_ahead, self.longest))
        if num_tokens <= request.capacity:
            return True
        begin, end = len(request.tables[0]), -(-num_tokens // self.page_size)
        needs, free = [policy.num_pages(begin, end) for policy in self.policies], self.num_free
        for group, page in request.source.items():
            needs[group] = 1 if free[group] or self.tree.num_holders(group, page) > 1 else 0
        if any(map(gt, needs, free)):
            return False
        for group, (table, pool, need) in enumerate(zip(request.tables, self.pools, needs)):
            while pool.num_free < need:
                self.tree.evict(group)
            pages = pool.allocate(need)
            if group in request.source:
                self._start_from(request, group, pages)
            else:
                table += pages
            if len(table) < end:
                table += [0] * (end - len(table))
        request.capacity = end * self.page_size
        self.num_queries += request.lookup[0]
        self.num_hits += request.lookup[1]
        request.lookup = 0, 0
        return True

    def _start_from(self, request: _Tables, group: int, pages: list[int]) -> None:
        """Its state becomes a copy of its source on this page; without one it takes the source itself."""
        source = request.source.pop(group)
        if pages:
            self.copies.append((group, source, pages[0]))
            self.tree.release(group, source)
        else:
            self.tree.drop_state(group, source)
        request.tables[group][0] = pages[0] if pages else source
        request.firsts[group] = 0

    def advance(self, id: str, tokens: Sequence[int], num_computed: int, count: int) -> int:
        """Commit, slide, make a checkpoint where one is due, and grow for the next `count` tokens at once, as a running
        request does in every step. Gives how many of them are to be computed: see `largest_chunk`; 0: there are no
        pages."""
        self.commit(id, tokens, min(num_computed, len(tokens)))
        self.slide(id, num_computed)
        if num_computed >= self._requests[id].next_state and not num_computed % self.page_size:
            self._keep_states(self._requests[id], num_computed)
        count = self.largest_chunk(id, num_computed, count)
        return count if self.grow(id, num_computed + count) else 0

    def quiet_until(self, id: str) -> int:
        """The number of computed tokens up to which the next one has its page and nothing is to be committed or given
        back."""
        request = self._requests[id]
        return min(request.capacity - self.num_ahead, request.next_commit, request.next_slide)

    def largest_chunk(self, id: str, num_computed: int, count: int) -> int:
        """How many of the next `count` tokens the groups that slide have pages for, at least 1, up to where a
        checkpoint is to be made; with `cuts`, up to where the second one is.

        A chunk longer than the window needs more pages at once than the request needs later: better a shorter chunk
        than to wait for pages that only the chunk needs. Other groups keep what they get, so there is nothing to gain.
        """
        if self.tree.sliding:
            capacity, free = self._requests[id].capacity, self.num_free
            for group, _ in self.tree.sliding:
                count = min(count, capacity + free[group] * self.page_size - num_computed)
        if self.tree.states and (stops := self._requests[id].stops):
            end, due = num_computed + count, self._requests[id].next_state
            if self.cuts and num_computed < stops[-1] < end:
                *stops, cut = stops
                due = cut + self.state_interval
            if stops:
                end = min(end, stops[-1])
                if end >= min(due, stops[-1]) and (page_end := end - end % self.page_size) > num_computed:
                    end = page_end
            count = end - num_computed
        return max(1, count)

    def cut(self, id: str, begin: int, end: int) -> tuple[int, ...]:
        """Of a chunk that has its pages, tokens [begin, end): the length at which the step is to store its states on
        its way, and in each group with states the page for it. (): nowhere, or there are no pages. To be called when
        all that the step computes has its pages, and before that is committed."""
        request = self._requests[id]
        if not request.stops or not self.cuts or not begin < request.stops[-1] < end:
            return ()
        at = request.stops[-1]
        self._plan_state(request, at)
        return (at, *pages) if (pages := self._take_states(request, at)) else ()

    def commit(self, id: str, tokens: Sequence[int], num_computed: int) -> None:
        """tokens[:num_computed] are known and computed: their whole pages may be shared from now on."""
        request = self._requests[id]
        if num_computed < request.next_commit:
            return
        assert request.node is not None and num_computed <= request.capacity
        num_pages = num_computed // self.page_size
        request.node = self.tree.extend(request.node, tokens, num_pages, request.tables, request.firsts)
        request.next_commit = (request.node.depth + 1) * self.page_size
        self._add_states(request)

    def _keep_states(self, request: _Tables, num_computed: int) -> None:
        """Copy its states into a checkpoint, if it needs one there and there are pages."""
        self._plan_state(request, num_computed)
        node, states = request.node, self.tree.states
        assert node is not None
        if node.alive and node.depth * self.page_size == num_computed:
            if all(node.pages[group] is not None for group in states):
                return
        if pages := self._take_states(request, num_computed):
            self.copies += ((group, request.tables[group][0], page) for group, page in zip(states, pages))
            self._add_states(request)

    def _take_states(self, request: _Tables, num_tokens: int) -> list[int]:
        """Pages for a checkpoint of this many tokens, which is pending then; none if there are none."""
        self._drop_pending(request)
        if not all(self.num_free[group] for group in self.tree.states):
            return []
        pages = []
        for group in self.tree.states:
            if not self.pools[group].num_free:
                self.tree.evict(group)
            pages += self.pools[group].allocate(1)
        request.pending = num_tokens, pages
        return pages

    def has_stops(self, id: str) -> bool:
        """Whether checkpoints of its prompt are still to be made."""
        return bool(self._requests[id].stops)

    def _plan_state(self, request: _Tables, num_kept: int) -> None:
        """When its next checkpoint is due, the last having been made after `num_kept` tokens."""
        while request.stops and request.stops[-1] <= num_kept:
            request.stops.pop()
        request.next_state = num_kept + (self.state_interval if request.stops else self.answer_interval)
        if request.stops:
            request.next_state = min(request.next_state, request.stops[-1])

    def _add_states(self, request: _Tables) -> None:
        """Its pending checkpoint, if it has one, goes into the tree as soon as its tokens are there."""
        node, size = request.node, self.page_size
        assert node is not None
        if request.pending is None or not node.alive or node.depth * size < request.pending[0]:
            return
        (num_tokens, pages), request.pending = request.pending, None
        while node.depth * size > num_tokens:
            assert node.parent is not None
            node = node.parent
        self.tree.touch(node)
        added = [self.tree.add_state(node, *state) for state in zip(self.tree.states, pages, strict=True)]
        if all(added) and num_tokens > request.prompt_end:
            earlier, request.in_answer = request.in_answer, node
            if earlier is not None and earlier.alive and len(earlier.children) == 1:
                for group in self.tree.states:
                    self.tree.drop_state(group, earlier.pages[group])

    def _drop_pending(self, request: _Tables) -> None:
        if request.pending is not None:
            for group, page in zip(self.tree.states, request.pending[1], strict=True):
                self.tree.release(group, page)
            request.pending = None

    def slide(self, id: str, num_computed: int) -> None:
        """The next query is at position num_computed: give back what it does not need."""
        request = self._requests[id]
        if num_computed < request.next_slide:
            return
        assert num_computed <= request.capacity
        for group, policy in self.tree.sliding:
            table, first = request.tables[group], policy.first_page(num_computed, self.page_size)
            for index in range(request.firsts[group], first):
                self.tree.release(group, table[index])
                table[index] = 0
            request.firsts[group] = max(first, request.firsts[group])
        request.next_slide = self._next_slide(request.firsts)

    def release(self, id: str) -> None:
        """Finished, aborted or preempted: give back all its pages. What was committed stays until evicted."""
        request = self._requests.pop(id)
        tree, node = self.tree, request.node
        self._drop_pending(request)
        for group, page in request.source.items():
            tree.release(group, page)
        if node is not None:
            tree.touch(node)
        for group, pages in enumerate(self._pages(request)):
            for page in reversed(pages):
                tree.release(group, page)
        if node is not None:
            assert request.root is not None
            tree.leave(request.root, node)

    def pages(self, id: str) -> list[list[int]]:
        """Per group, the page of each logical page; 0 where there is none (any more). Not a copy: read it at once."""
        return self._requests[id].tables

    # The pool as a whole.

    @property
    def num_free(self) -> list[int]:
        """Per group, the pages a request could get: free ones, and cached ones that no request holds."""
        return [pool.num_free + unused for pool, unused in zip(self.pools, self.tree.num_unused)]

    def usage(self) -> float:
        """The share of pages that requests hold, 0 .. 1, in the fullest group."""
        return max(1 - free / pool.num_pages for pool, free in zip(self.pools, self.num_free))

    def fits(self, num_tokens: int) -> bool:
        """Whether there are enough pages for a request of this length that runs alone."""
        most = [policy.peak_pages(num_tokens, self.max_chunk, self.page_size) for policy in self.policies]
        return all(pages <= pool.num_pages for pages, pool in zip(most, self.pools))

    def check(self) -> None:
        """Every invariant, by brute force."""
        self.tree.check()
        nodes = [*self.tree.roots.values(), *self.tree.nodes()]
        ends: list[Node | None] = []
        for request in self._requests.values():
            self._check_request(request)
            ends += request.node, request.root
        pins = Counter(map(id, ends))
        assert all(node.pins == pins[id(node)] for node in nodes)
        for group, pool in enumerate(self.pools):
            pool.check()
            counts = [0] * pool.num_pages
            for node in nodes:
                if (page := node.pages[group]) is not None:
                    counts[page] += 1
            for request in self._requests.values():
                for page in self._pages(request)[group]:
                    counts[page] += 1
                if group in request.source:
                    counts[request.source[group]] += 1
                if request.pending is not None and group in self.tree.states:
                    counts[request.pending[1][self.tree.states.index(group)]] += 1
            assert counts == pool.counts
        assert 0 <= self.num_hits <= self.num_queries
        assert 0 <= self.usage() <= 1

    def _check_request(self, request: _Tables) -> None:
        for group, (table, first, pages) in enumerate(zip(request.tables, request.firsts, self._pages(request))):
            assert len(table) * self.page_size == request.capacity
            assert 0 <= first <= (len(table) if self.policies[group].slides or group in request.source else 0)
            assert self.policies[group].per_token or group in request.source or len(pages) == min(len(table), 1)
            assert not any(table[:first]) and not any(table[first + len(pages) :])
            assert len(set(pages)) == len(pages), "a page twice in one request"
        assert request.next_slide == self._next_slide(request.firsts)
        if request.node is None:
            assert request.root is None and request.next_commit == NEVER
            return
        assert self.prefix_cache and request.next_commit == (request.node.depth + 1) * self.page_size
        assert request.next_commit <= request.capacity + self.page_size
        assert request.root is not None and self.tree.roots[str(request.root.key)] is request.root
        top = request.node
        while top.parent is not None:
            top = top.parent
        assert top is request.root

    def _pages(self, request: _Tables) -> list[list[int]]:
        """Per group, the pages that the request has."""
        return [
            table[first : first + policy.num_pages(first, len(table))]
            for table, first, policy in zip(request.tables, request.firsts, self.policies)
        ]

    def _next_slide(self, firsts: Sequence[int]) -> int:
        return min(
            (policy.needed_until(firsts[group], self.page_size) for group, policy in self.tree.sliding), default=NEVER
        )
