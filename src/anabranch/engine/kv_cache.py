"""Which pages each request has, in every cache group, shared with others as far as prefixes agree.

Ints alone, no tensors; how long a group needs a page is its policy's to say (layers/cache). A running request costs
three comparisons a step, until a page fills up. Its life: begin → (grow → compute → commit → slide)* → release. Commit
before slide, or pages are given back without having been cached.

Worked example, pages of 4 tokens, a group that keeps all and one with a window of 6. A request of 10 tokens, of which
the tree knows the first 8, begins with 8 tokens and pages [[7, 2], [3, 5]]. grow(10) makes it [[7, 2, 9], [3, 5, 1]].
After 10 tokens the next query, at position 10, sees 5 .. 10: slide gives back the second group's first page and leaves
[[7, 2, 9], [0, 5, 1]]. A third group with one state per request would have [4, 0, 0] all the time.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt

from anabranch.engine.pages import PagePool
from anabranch.engine.radix_tree import Node, RadixTree
from anabranch.layers.cache import NEVER, CacheGroup


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


class KVCache:
    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        page_size: int,
        prefix_cache: bool = True,
        *,
        max_chunk: int,
    ) -> None:
        """`num_pages` has one number a group; `max_chunk` is the most tokens of one request computed in one step. There
        is no prefix cache if a group's pages cannot be reused."""
        assert len(groups) == len(num_pages) > 0 and page_size > 0 and max_chunk > 0
        self.page_size = page_size
        self.policies = [group.policy for group in groups]
        self.prefix_cache = prefix_cache and all(policy.reusable for policy in self.policies)
        self.max_chunk = max_chunk
        self.pools = [PagePool(n) for n in num_pages]
        self.tree = RadixTree(self.pools, self.policies, page_size)
        self.num_queries = 0
        """Tokens looked up in the tree, by requests that then got the pages to run."""
        self.num_hits = 0
        """Those of them that were found."""
        self._requests: dict[str, _Tables] = {}

    # The life of a request.

    def begin(self, id: str, tokens: Sequence[int], salt: str = "", reuse: bool = True) -> int:
        """Start a request with the pages of the longest cached prefix; returns how many tokens these hold: whole pages,
        but never all tokens, because the last must be computed to sample the next."""
        assert id not in self._requests, f"request {id} has begun already"
        assert tokens
        tree, size = self.tree, self.page_size
        path: list[Node] = []
        if reuse and self.prefix_cache:
            path = tree.match(tokens, salt, (len(tokens) - 1) // size)
        found = len(path) * size
        firsts = [policy.first_page(found, size) for policy in self.policies]
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
        return found

    def grow(self, id: str, num_tokens: int) -> bool:
        """Allocate pages for its first `num_tokens` tokens, evicting unused ones if need be. False, and no change, if
        there are not enough."""
        request = self._requests[id]
        if num_tokens <= request.capacity:
            return True
        begin, end = len(request.tables[0]), -(-num_tokens // self.page_size)
        needs = [policy.num_pages(begin, end) for policy in self.policies]
        if any(map(gt, needs, self.num_free)):
            return False
        for group, (table, pool, need) in enumerate(zip(request.tables, self.pools, needs)):
            while pool.num_free < need:
                self.tree.evict(group)
            table += pool.allocate(need)
            if len(table) < end:
                table += [0] * (end - len(table))
        request.capacity = end * self.page_size
        self.num_queries += request.lookup[0]
        self.num_hits += request.lookup[1]
        request.lookup = 0, 0
        return True

    def advance(self, id: str, tokens: Sequence[int], num_computed: int, count: int) -> int:
        """Commit, slide and grow for the next `count` tokens at once, as a running request does in every step. Gives
        how many of them there are pages for: fewer where groups that slide are short, 0 where others are."""
        self.commit(id, tokens, min(num_computed, len(tokens)))
        self.slide(id, num_computed)
        count = self.largest_chunk(id, num_computed, count)
        return count if self.grow(id, num_computed + count) else 0

    def quiet_until(self, id: str) -> int:
        """The number of computed tokens up to which the next one has its page and nothing is to be committed or given
        back."""
        request = self._requests[id]
        return min(request.capacity, request.next_commit, request.next_slide)

    def largest_chunk(self, id: str, num_computed: int, count: int) -> int:
        """How many of the next `count` tokens the groups that slide have pages for, at least 1.

        A chunk longer than the window needs more pages at once than the request needs later: better a shorter chunk
        than to wait for pages that only the chunk needs. Other groups keep what they get, so there is nothing to gain.
        """
        if self.tree.sliding:
            capacity, free = self._requests[id].capacity, self.num_free
            for group, _ in self.tree.sliding:
                count = min(count, capacity + free[group] * self.page_size - num_computed)
        return max(1, count)

    def commit(self, id: str, tokens: Sequence[int], num_computed: int) -> None:
        """tokens[:num_computed] are known and computed: their whole pages may be shared from now on."""
        request = self._requests[id]
        if num_computed < request.next_commit:
            return
        assert request.node is not None and num_computed <= request.capacity
        num_pages = num_computed // self.page_size
        request.node = self.tree.extend(request.node, tokens, num_pages, request.tables, request.firsts)
        request.next_commit = (request.node.depth + 1) * self.page_size

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

    @property
    def num_cached(self) -> list[int]:
        """Per group, the pages in the prefix cache, held or not."""
        return list(self.tree.num_cached)

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
            assert counts == pool.counts
        assert 0 <= self.num_hits <= self.num_queries
        assert 0 <= self.usage() <= 1

    def _check_request(self, request: _Tables) -> None:
        for table, first, pages, policy in zip(request.tables, request.firsts, self._pages(request), self.policies):
            assert len(table) * self.page_size == request.capacity
            assert 0 <= first <= (len(table) if policy.slides else 0)
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
