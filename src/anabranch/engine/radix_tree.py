"""Which pages hold which tokens: a tree whose edges are whole pages of tokens, one root for each salt.

The tree holds one reference on each page it keeps. A page is *held* while a request has a reference too, else *unused*:
then it may be evicted, the longest unused first. It knows nothing of requests but the references on pages and the pins
on nodes.

A node has a page for each group. In groups that keep all tokens all of them are there, as a path with a hole is of no
use, so what is evicted is a leaf. In groups that slide any page may go and leave a hole (None): only those that the
query after a match needs must be there. With such groups alone a node may be bare; a bare leaf goes at once, unless
pinned.

In groups with one state per request a node's page is a *checkpoint*: a copy of the state after all tokens up to the
node's end. Few nodes have one, and a match ends at a node that has. No request holds it while it runs, since each has a
state of its own, so it may be evicted at any time.

Two requests may compute the same tokens at the same time. The first to insert wins; the second keeps pages of its own,
and its further nodes are then children of nodes that it does not hold. Such nodes can be unused without being leaves.
When no unused leaf is left they go too, and all below them: the requests there hold copies of every page on their path
and put these in their place with the next insert (they find their node dead and climb to the first living one).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

from anabranch.engine.pages import PagePool
from anabranch.layers.cache import CachePolicy


class Node:
    __slots__ = ("alive", "children", "depth", "key", "pages", "parent", "pins", "stamp")

    def __init__(self, parent: Node | None, key: tuple[int, ...] | str, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        """The page's tokens; of a root, the salt."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Pages from the root down to here, this one included."""
        self.children: dict[tuple[int, ...] | str, Node] = {}
        self.pages: list[int | None] = [None] * num_groups
        self.pins = 0
        """Requests whose path ends here; at a root, also those whose path begins here."""
        self.stamp = 0
        """When it was last used. One use stamps one path, so stamp and depth together are unique."""
        self.alive = True
        """In the tree. A dead node keeps its parent."""


class RadixTree:
    def __init__(self, pools: Sequence[PagePool], policies: Sequence[CachePolicy], page_size: int) -> None:
        self.pools = pools
        self.policies = policies
        self.page_size = page_size
        self.sliding = [(group, policy) for group, policy in enumerate(policies) if policy.slides]
        self.states = [group for group, policy in enumerate(policies) if not policy.per_token]
        self._sparse = [policy.slides or not policy.per_token for policy in policies]
        """Per group, whether nodes may have holes."""
        self.roots: dict[str, Node] = {}
        self.num_cached = [0] * len(pools)
        """Per group, the pages in the tree."""
        self.num_unused = [0] * len(pools)
        """Per group, those of them that no request holds."""
        self._clock = 0
        self._owner: list[list[Node | None]] = [[None] * pool.num_pages for pool in pools]
        # The group whose queue orders leaves. Groups that keep all have pages in the same nodes, held by the same
        # requests.
        self._leaf_group = next((group for group, sparse in enumerate(self._sparse) if not sparse), None)
        # One heap a group of (stamp, −depth, page), at most one entry a page. Every unused page has one, or is in
        # _inner. Entries are lazy: a page may be held or gone by now, or used since; then its key is too low, never too
        # high, so it is put right when it comes up.
        self._heaps: list[list[tuple[int, int, int]]] = [[] for _ in pools]
        self._queued = [bytearray(pool.num_pages) for pool in pools]
        self._inner: dict[int, None] = {}
        """Pages of the leaf group that came up and were not leaves. Lazy too."""

    def match(self, tokens: Sequence[int], salt: str, max_pages: int) -> tuple[list[Node], int]:
        """The longest path that a request may start from, and how many pages it would have if all nodes had states."""
        path: list[Node] = []
        node, size = self.roots.get(salt), self.page_size
        usable = paged = 0
        run = [0] * len(self.sliding)  # pages without a hole, up to here
        while node is not None and len(path) < max_pages:
            begin = len(path) * size
            node = node.children.get(tuple(tokens[begin : begin + size]))
            if node is None:
                break
            path.append(node)
            whole = True
            for i, (group, policy) in enumerate(self.sliding):
                run[i] = 0 if node.pages[group] is None else run[i] + 1
                whole &= run[i] >= node.depth - policy.first_page(node.depth * size, size)
            if whole:
                paged = len(path)
                if all(node.pages[group] is not None for group in self.states):
                    usable = paged
        return path[:usable], paged

    def enter(self, salt: str, node: Node | None) -> tuple[Node, Node]:
        """A request begins at this node of a match (None: at the root). Returns (root, node), both pinned."""
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = Node(None, salt, len(self.pools))
        node = node or root
        root.pins += 1
        node.pins += 1
        return root, node

    def leave(self, root: Node, node: Node) -> None:
        """Opposite of enter, with the node that the request has come to."""
        for pinned in (node, root):
            pinned.pins -= 1
            if pinned.alive:
                self._shed(pinned)

    def extend(
        self,
        node: Node,
        tokens: Sequence[int],
        num_pages: int,
        tables: Sequence[Sequence[int]],
        firsts: Sequence[int],
    ) -> Node:
        """Insert a request's first `num_pages` pages, from its node on; its pin moves to the last node, the result.

        `tables` has the request's pages of each group; those before `firsts` it no longer has. Where the tree has a
        page already it keeps its own; a hole is filled. States are added by `add_state`.
        """
        start, size = node, self.page_size
        while not node.alive:
            assert node.parent is not None, "a root is alive while pinned"
            node = node.parent
        self._clock += 1
        for index in range(node.depth, num_pages):
            key = tuple(tokens[index * size : (index + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, len(self.pools))
            child.stamp = self._clock
            for group, first in enumerate(firsts):
                if index >= first and child.pages[group] is None and group not in self.states:
                    self._keep(child, group, tables[group][index])
            node = child
        start.pins -= 1
        node.pins += 1
        return node

    def add_state(self, node: Node, group: int, page: int) -> bool:
        """A checkpoint for the node, which was touched just now, with the caller's reference on it. False: it has one
        already, which stays."""
        missing = node.pages[group] is None
        if missing:
            self._keep(node, group, page)
        self.release(group, page)
        return missing

    def drop_state(self, group: int, page: int | None) -> None:
        """The tree no longer keeps this checkpoint, if it does."""
        if page is not None and (node := self._owner[group][page]) is not None:
            self._drop(node, group)
            self._shed(node)

    def touch(self, node: Node) -> None:
        """The path to this node is in use now: with equal stamps the deeper goes first."""
        self._clock += 1
        up: Node | None = node
        while up is not None:
            up.stamp = self._clock
            up = up.parent

    def num_holders(self, group: int, page: int) -> int:
        """References of requests on this page."""
        return self.pools[group].counts[page] - (self._owner[group][page] is not None)

    def share(self, group: int, page: int) -> None:
        """A request holds this page of the tree."""
        pool = self.pools[group]
        if pool.counts[page] == 1:
            self.num_unused[group] -= 1
        pool.share(page)

    def release(self, group: int, page: int) -> None:
        """A request no longer holds this page, be it the tree's or the request's own."""
        pool = self.pools[group]
        pool.release(page)
        if pool.counts[page] == 1 and (node := self._owner[group][page]) is not None:
            self.num_unused[group] += 1
            self._queue(group, node)

    def evict(self, group: int) -> None:
        """Free at least one page of this group; one must be unused."""
        assert self.num_unused[group] > 0
        if self._sparse[group]:
            node = self._oldest(group)
            assert node is not None
            self._drop(node, group)
            self._shed(node)
        else:
            self._evict_leaf()

    def _evict_leaf(self) -> None:
        group = self._leaf_group
        assert group is not None
        while (node := self._oldest(group)) is not None:
            if node.children:
                page = node.pages[group]
                assert page is not None
                self._inner[page] = None
                continue
            self._remove(node)
            return
        counts, owner = self.pools[group].counts, self._owner[group]
        for page in self._inner:
            if counts[page] == 1 and (node := owner[page]) is not None:
                self._remove(node)
        self._inner.clear()

    def _oldest(self, group: int) -> Node | None:
        """Takes the unused page that was used longest ago from the queue."""
        heap, owner, counts = self._heaps[group], self._owner[group], self.pools[group].counts
        while heap:
            page = heap[0][2]
            node = owner[page]
            if node is None or counts[page] != 1:
                node = None
            elif heap[0] != (entry := (node.stamp, -node.depth, page)):
                heapreplace(heap, entry)
                continue
            heappop(heap)
            self._queued[group][page] = False
            if node is not None:
                return node
        return None

    def _queue(self, group: int, node: Node) -> None:
        page = node.pages[group]
        assert page is not None
        if (self._sparse[group] or group == self._leaf_group) and not self._queued[group][page]:
            self._queued[group][page] = True
            heappush(self._heaps[group], (node.stamp, -node.depth, page))

    def _keep(self, node: Node, group: int, page: int) -> None:
        assert self._owner[group][page] is None, f"page {page} of group {group} is in the tree already"
        self.pools[group].share(page)
        self._owner[group][page] = node
        self.num_cached[group] += 1
        node.pages[group] = page

    def _drop(self, node: Node, group: int) -> None:
        """Opposite of _keep."""
        page = node.pages[group]
        assert page is not None
        node.pages[group] = None
        self.num_cached[group] -= 1
        self._owner[group][page] = None
        if self.pools[group].counts[page] == 1:
            self.num_unused[group] -= 1
        self.pools[group].release(page)

    def _remove(self, top: Node) -> None:
        """This node and all below it, pinned or not."""
        below = [top]
        while below:
            node = below.pop()
            below += node.children.values()
            node.alive = False
            for group, page in enumerate(node.pages):
                if page is not None:
                    self._drop(node, group)
        assert top.parent is not None
        del top.parent.children[top.key]
        self._shed(top.parent)

    def _shed(self, node: Node) -> None:
        """After the node lost something: it goes if nothing is left, and its ancestors likewise."""
        while not node.children and not node.pins and all(page is None for page in node.pages):
            node.alive = False
            if node.parent is None:
                assert isinstance(node.key, str)
                del self.roots[node.key]
                return
            del node.parent.children[node.key]
            node = node.parent
        if (group := self._leaf_group) is not None and not node.children and (page := node.pages[group]) is not None:
            if self.pools[group].counts[page] == 1:
                self._queue(group, node)

    def nodes(self) -> list[Node]:
        """All but the roots, parents first."""
        found = list(self.roots.values())
        for node in found:  # which grows meanwhile
            found += node.children.values()
        return found[len(self.roots) :]

    def check(self) -> None:
        kept: list[dict[int, Node]] = [{} for _ in self.pools]
        for salt, root in self.roots.items():
            assert (root.key, root.parent, root.depth, root.alive) == (salt, None, 0, True)
            assert root.children or root.pins > 0
            assert all(page is None for page in root.pages)
        for node in self.nodes():
            assert node.alive and node.parent is not None
            assert node.parent.children[node.key] is node and node.depth == node.parent.depth + 1
            assert isinstance(node.key, tuple) and len(node.key) == self.page_size
            assert node.pins >= 0
            assert node.children or node.pins or any(page is not None for page in node.pages), "a bare leaf"
            held = set()
            for group, page in enumerate(node.pages):
                if page is None:
                    assert self._sparse[group], "a hole in a group that keeps all"
                    continue
                assert page not in kept[group], f"page {page} is in two nodes"
                kept[group][page] = node
                if not self._sparse[group]:
                    held.add(self.pools[group].counts[page] > 1)
            assert len(held) <= 1, "groups that keep all are held together"
        for group, nodes in enumerate(kept):
            self._check_group(group, nodes)

    def _check_group(self, group: int, nodes: dict[int, Node]) -> None:
        counts, heap, queued = self.pools[group].counts, self._heaps[group], self._queued[group]
        assert {page: node for page, node in enumerate(self._owner[group]) if node is not None} == nodes
        assert all(counts[page] > 0 for page in nodes)
        unused = [page for page in nodes if counts[page] == 1]
        assert (len(nodes), len(unused)) == (self.num_cached[group], self.num_unused[group])
        entries = {page: (stamp, depth) for stamp, depth, page in heap}
        assert len(entries) == len(heap) == sum(queued) and all(queued[page] for page in entries)
        assert all(heap[(i - 1) // 2] <= heap[i] for i in range(1, len(heap)))
        if not self._sparse[group] and group != self._leaf_group:
            assert not heap
            return
        for page in unused:
            node = nodes[page]
            if page in entries:
                assert entries[page] <= (node.stamp, -node.depth), "an entry must not come up too late"
            else:
                assert group == self._leaf_group and page in self._inner and node.children, f"page {page} is lost"
