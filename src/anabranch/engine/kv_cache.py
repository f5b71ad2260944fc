"""Where each request's keys and values live: its pages in every KVGroup, shared with others as far as prefixes agree.

Ints alone, no tensors. What a running request costs per step is three comparisons, until a page fills up. Its life:
begin → (grow → compute → commit → slide)* → release. Commit before slide, or pages behind the window go without having
been cached.

Worked example, pages of 4 tokens, one full group and one with a window of 6. A request of 10 tokens, of which the tree
knows the first 8, begins with 8 tokens and pages [[7, 2], [3, 5]]. grow(10) makes it [[7, 2, 9], [3, 5, 1]]. After 10
tokens the next query, at position 10, sees 5 .. 10: slide gives back the sliding group's first page and leaves
[[7, 2, 9], [0, 5, 1]].
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from anabranch.engine.pages import PagePool
from anabranch.engine.radix_tree import Node, RadixTree, first_page
from anabranch.models.config import KVGroup

NEVER = sys.maxsize


class _Holder:
    """What one request holds. All its tables are equally long."""

    __slots__ = ("capacity", "firsts", "lookup", "next_commit", "next_slide", "node", "root", "tables")

    def __init__(self, tables: list[list[int]], firsts: list[int]) -> None:
        self.tables = tables
        self.firsts = firsts
        """Per group, the first page it still holds: it holds all from there on."""
        self.capacity = 0
        """Tokens that have pages."""
        self.lookup = 0, 0
        """Tokens it looked up and found, until counted: a request that is refused its first page asks again."""
        self.next_commit = NEVER
        """Computed tokens that fill the next page for the tree."""
        self.next_slide = NEVER
        """Computed tokens with which the next page falls behind a window."""
        self.root: Node | None = None
        """None: it has no part in the prefix cache."""
        self.node: Node | None = None
        """How far it has committed: as many pages as the node is deep. May be dead."""


class KVCache:
    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_pages: Sequence[int],
        page_size: int,
        prefix_cache: bool = True,
        *,
        max_chunk: int,
    ) -> None:
        """`num_pages` has one number a group; `max_chunk` is the most tokens of one request computed in one step."""
        assert len(groups) == len(num_pages) > 0 and page_size > 0 and max_chunk > 0
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.max_chunk = max_chunk
        self.windows = [group.window for group in groups]
        self.pools = [PagePool(n) for n in num_pages]
        self.tree = RadixTree(self.pools, self.windows, page_size)
        self.num_queries = 0
        """Tokens looked up in the tree, by requests that then got the pages to run."""
        self.num_hits = 0
        """Those of them that were found."""
        self._holders: dict[str, _Holder] = {}

    # The life of a request.

    def begin(self, id: str, tokens: Sequence[int], salt: str = "", reuse: bool = True) -> int:
        """The request takes shares in the longest cached prefix and is told how many tokens that is: whole pages, but
        never all tokens, because the last must be computed to know the next."""
        assert id not in self._holders, f"request {id} has begun already"
        assert tokens
        tree, size = self.tree, self.page_size
        path: list[Node] = []
        if reuse and self.prefix_cache:
            path = tree.match(tokens, salt, (len(tokens) - 1) // size)
        found = len(path) * size
        firsts = [first_page(found, window, size) for window in self.windows]
        tables: list[list[int]] = []
        for group, first in enumerate(firsts):
            table = [0] * first
            for node in path[first:]:
                page = node.pages[group]
                assert page is not None
                tree.share(group, page)
                table.append(page)
            tables.append(table)
        holder = self._holders[id] = _Holder(tables, firsts)
        holder.capacity = found
        if reuse and self.prefix_cache:
            holder.lookup = len(tokens), found
        holder.next_slide = self._next_slide(firsts)
        if self.prefix_cache:
            if path:
                tree.touch(path[-1])
            holder.root, holder.node = tree.enter(salt, path[-1] if path else None)
            holder.next_commit = found + size
        return found

    def grow(self, id: str, num_tokens: int) -> bool:
        """Make pages exist for so many tokens, evicting unused ones if need be. False, and nothing done, if there are
        not enough."""
        holder = self._holders[id]
        if num_tokens <= holder.capacity:
            return True
        need = -(-num_tokens // self.page_size) - len(holder.tables[0])
        if need > min(self.num_free):
            return False
        for group, pool in enumerate(self.pools):
            while pool.num_free < need:
                self.tree.evict(group)
        for table, pool in zip(holder.tables, self.pools):
            table += pool.allocate(need)
        holder.capacity += need * self.page_size
        self.num_queries += holder.lookup[0]
        self.num_hits += holder.lookup[1]
        holder.lookup = 0, 0
        return True

    def advance(self, id: str, tokens: Sequence[int], num_computed: int, count: int) -> int:
        """Commit, slide and grow for the next `count` tokens at once, as a running request does in every step. Gives
        how many of them there are pages for: fewer where sliding groups are short, 0 where full ones are."""
        self.commit(id, tokens, min(num_computed, len(tokens)))
        self.slide(id, num_computed)
        count = self.largest_chunk(id, num_computed, count)
        return count if self.grow(id, num_computed + count) else 0

    def quiet_until(self, id: str) -> int:
        """Until so many tokens are computed, the next one has its page and there is nothing to commit or give back."""
        holder = self._holders[id]
        return min(holder.capacity, holder.next_commit, holder.next_slide)

    def largest_chunk(self, id: str, num_computed: int, count: int) -> int:
        """How many of the next `count` tokens the sliding groups have pages for, at least 1.

        A chunk longer than the window needs more pages at once than the request needs later: better a shorter chunk
        than to wait for pages that only the chunk wants. Full groups keep what they get, so there is nothing to gain.
        """
        capacity, free = self._holders[id].capacity, self.num_free
        for group, _ in self.tree.sliding:
            count = min(count, capacity + free[group] * self.page_size - num_computed)
        return max(1, count)

    def commit(self, id: str, tokens: Sequence[int], num_computed: int) -> None:
        """tokens[:num_computed] are known and computed: their whole pages may be shared from now on."""
        holder = self._holders[id]
        if num_computed < holder.next_commit:
            return
        assert holder.node is not None and num_computed <= holder.capacity
        num_pages = num_computed // self.page_size
        holder.node = self.tree.extend(holder.node, tokens, num_pages, holder.tables, holder.firsts)
        holder.next_commit = (holder.node.depth + 1) * self.page_size

    def slide(self, id: str, num_computed: int) -> None:
        """The next query is at position num_computed: give back what is behind its window."""
        holder = self._holders[id]
        if num_computed < holder.next_slide:
            return
        assert num_computed <= holder.capacity
        for group, window in self.tree.sliding:
            table, first = holder.tables[group], first_page(num_computed, window, self.page_size)
            for index in range(holder.firsts[group], first):
                self.tree.release(group, table[index])
                table[index] = 0
            holder.firsts[group] = max(first, holder.firsts[group])
        holder.next_slide = self._next_slide(holder.firsts)

    def release(self, id: str) -> None:
        """Finished, aborted or preempted: it holds nothing any more. What was committed stays until evicted."""
        holder = self._holders.pop(id)
        tree, node = self.tree, holder.node
        if node is not None:
            tree.touch(node)
        for group, (table, first) in enumerate(zip(holder.tables, holder.firsts)):
            for index in range(len(table) - 1, first - 1, -1):
                tree.release(group, table[index])
        if node is not None:
            assert holder.root is not None
            tree.leave(holder.root, node)

    def pages(self, id: str) -> list[list[int]]:
        """Per group, the page of each logical page; 0 where it was given back. Not a copy: read it at once."""
        return self._holders[id].tables

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
        """Can a request of so many tokens, alone, be held from beginning to end?"""
        return all(self._worst(num_tokens, window) <= pool.num_pages for window, pool in zip(self.windows, self.pools))

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Requests that run now keep their pages, but these never enter the cache: what was to be
        forgotten (weights have changed, say) does not come back."""
        self.tree.clear()
        for holder in self._holders.values():
            holder.root = holder.node = None
            holder.next_commit = NEVER

    def check(self) -> None:
        """Every invariant, by brute force."""
        self.tree.check()
        nodes = [*self.tree.roots.values(), *self.tree.nodes()]
        ends: list[Node | None] = []
        for holder in self._holders.values():
            self._check_holder(holder)
            ends += holder.node, holder.root
        pins = Counter(map(id, ends))
        assert all(node.pins == pins[id(node)] for node in nodes)
        for group, pool in enumerate(self.pools):
            pool.check()
            counts = [0] * pool.num_pages
            for node in nodes:
                if (page := node.pages[group]) is not None:
                    counts[page] += 1
            for holder in self._holders.values():
                for page in holder.tables[group][holder.firsts[group] :]:
                    counts[page] += 1
            assert counts == pool.counts
        assert 0 <= self.num_hits <= self.num_queries
        assert 0 <= self.usage() <= 1

    def _check_holder(self, holder: _Holder) -> None:
        for table, first, window in zip(holder.tables, holder.firsts, self.windows):
            assert len(table) * self.page_size == holder.capacity
            assert 0 <= first <= (len(table) if window else 0) and not any(table[:first])
            assert len(set(table[first:])) == len(table) - first, "a page twice in one request"
        assert holder.next_slide == self._next_slide(holder.firsts)
        if holder.node is None:
            assert holder.root is None and holder.next_commit == NEVER
            return
        assert self.prefix_cache and holder.next_commit == (holder.node.depth + 1) * self.page_size
        assert holder.next_commit <= holder.capacity + self.page_size
        assert holder.root is not None and self.tree.roots[str(holder.root.key)] is holder.root
        top = holder.node
        while top.parent is not None:
            top = top.parent
        assert top is holder.root

    def _next_slide(self, firsts: Sequence[int]) -> int:
        # Page f ends before position − window + 1.
        return min(
            ((firsts[group] + 1) * self.page_size + window - 1 for group, window in self.tree.sliding), default=NEVER
        )

    def _worst(self, num_tokens: int, window: int) -> int:
        """Pages of a group at the worst moment: while the chunk that ends at some `end` is computed, its own and those
        under the window of its first token. After `span` tokens this repeats from page to page."""
        size = self.page_size
        span = self.max_chunk + window - 1 if window else num_tokens
        ends = range(max(1, num_tokens - size + 1), num_tokens + 1)
        return max(-(-end // size) - max(0, end - span) // size for end in ends)
