"""Worked examples of the prefix tree: what it finds, what it lets go and in which order.

Tokens are letters here: `cache(tree, "abcd")` with pages of 2 makes the path ab → cd. Random walks against a
brute-force model are in test_kv_cache.
"""

from collections.abc import Sequence

import pytest

from anabranch.engine.pages import PagePool
from anabranch.engine.radix_tree import Node, RadixTree
from anabranch.layers.cache import KeepAll, KeepWindow

SIZE = 2


def make(*windows: int, num_pages: int = 12) -> RadixTree:
    policies = [KeepWindow(window) if window else KeepAll() for window in windows]
    return RadixTree([PagePool(num_pages) for _ in windows], policies, SIZE)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


class Request:
    """Computes all of `text` in pages of its own, or continues from what the tree has; then inserts it."""

    def __init__(
        self, tree: RadixTree, text: str, salt: str = "", reuse: bool = True, lost: Sequence[int] = ()
    ) -> None:
        """`lost`: per group, the pages it has given back before it inserts."""
        self.tree = tree
        path = tree.match(ids(text), salt, len(text) // SIZE)[0] if reuse else []
        begin, count = len(path), len(text) // SIZE
        self.firsts = [policy.first_page(begin * SIZE, SIZE) for policy in tree.policies]
        self.tables: list[list[int]] = []
        for group, first in enumerate(self.firsts):
            shared = [page for node in path[first:] if (page := node.pages[group]) is not None]
            assert len(shared) == begin - min(first, begin)
            for page in shared:
                tree.share(group, page)
            self.tables.append([0] * first + shared + tree.pools[group].allocate(count - begin))
        if path:
            tree.touch(path[-1])
        self.root, self.node = tree.enter(salt, path[-1] if path else None)
        self.num_found = begin
        for group, first in enumerate(lost):
            self.slide(group, first)
        self.insert(text)

    def slide(self, group: int, first: int) -> None:
        for index in range(self.firsts[group], first):
            self.tree.release(group, self.tables[group][index])
        self.firsts[group] = max(first, self.firsts[group])

    def insert(self, text: str) -> None:
        for group, table in enumerate(self.tables):
            table += self.tree.pools[group].allocate(len(text) // SIZE - len(table))
        self.node = self.tree.extend(self.node, ids(text), len(text) // SIZE, self.tables, self.firsts)
        self.tree.check()

    def end(self) -> None:
        self.tree.touch(self.node)
        for group, first in enumerate(self.firsts):
            for page in reversed(self.tables[group][first:]):
                self.tree.release(group, page)
        self.tree.leave(self.root, self.node)
        self.tree.check()


def cache(tree: RadixTree, text: str, salt: str = "") -> None:
    Request(tree, text, salt).end()


def text_of(node: Node) -> str:
    text = ""
    while node.parent is not None:
        text = "".join(map(chr, node.key)) + text  # type: ignore[arg-type]
        node = node.parent
    return text


def paths(tree: RadixTree) -> set[str]:
    return {text_of(node) for node in tree.nodes()}


def evict(tree: RadixTree, group: int = 0) -> set[str]:
    """The paths that went with one eviction."""
    before = paths(tree)
    tree.evict(group)
    tree.check()
    return before - paths(tree)


def found(tree: RadixTree, text: str, salt: str = "") -> str:
    path, _ = tree.match(ids(text), salt, len(text) // SIZE)
    return text_of(path[-1]) if path else ""


def holes(tree: RadixTree, group: int) -> set[str]:
    return {text_of(node) for node in tree.nodes() if node.pages[group] is None}


def test_first_page() -> None:
    for window in range(1, 12):
        for position in range(40):
            visible = range(max(0, position - window + 1), position + 1)
            assert KeepWindow(window).first_page(position, 4) == visible[0] // 4
    assert KeepAll().first_page(1000, 4) == 0


def test_match_is_whole_pages_from_the_root() -> None:
    tree = make(0)
    cache(tree, "abcdef")
    assert found(tree, "abcdef") == "abcdef"
    assert found(tree, "abcdeX") == "abcd"
    assert found(tree, "abcde") == "abcd"
    assert found(tree, "abXdef") == "ab"
    assert found(tree, "cdef") == found(tree, "a") == found(tree, "") == ""
    assert [len(tree.match(ids("abcdef"), "", most)[0]) for most in range(5)] == [0, 1, 2, 3, 3]


def test_what_is_there_is_not_stored_twice() -> None:
    tree = make(0)
    cache(tree, "abcdef")
    cache(tree, "abcdXY")
    assert paths(tree) == {"ab", "abcd", "abcdef", "abcdXY"}
    assert tree.num_cached == tree.num_unused == [4] and tree.pools[0].num_free == 8


def test_salts_do_not_meet_and_leave_nothing_behind() -> None:
    tree = make(0)
    cache(tree, "abcd", "mine")
    assert found(tree, "abcd", "mine") == "abcd"
    assert found(tree, "abcd", "yours") == found(tree, "abcd") == ""
    cache(tree, "abcd", "yours")
    assert tree.num_cached == [4]
    while tree.num_unused[0]:
        evict(tree)
    assert tree.roots == {}


def test_the_longest_unused_goes_first_and_of_a_path_its_end() -> None:
    tree = make(0)
    cache(tree, "abcdef")
    cache(tree, "uvwxyz")
    order = ["abcdef", "abcd", "ab", "uvwxyz", "uvwx", "uv"]
    assert [evict(tree) for _ in order] == [{path} for path in order]
    assert tree.pools[0].num_free == 12


def test_a_match_makes_its_path_recent_but_not_what_lies_below() -> None:
    tree = make(0)
    cache(tree, "abcdef")
    cache(tree, "uvwx")
    cache(tree, "abcd")
    order = ["abcdef", "uvwx", "uv", "abcd", "ab"]
    assert [evict(tree) for _ in order] == [{path} for path in order]


def test_a_trunk_outlives_its_branches() -> None:
    tree = make(0)
    cache(tree, "abcdef")
    cache(tree, "mn")
    cache(tree, "abcdXY")
    order = ["abcdef", "mn", "abcdXY", "abcd", "ab"]
    assert [evict(tree) for _ in order] == [{path} for path in order]


def test_what_a_request_holds_stays() -> None:
    tree = make(0)
    cache(tree, "abcdef")
    runs = Request(tree, "abcdXY")
    assert runs.num_found == 2 and tree.num_unused == [1]
    assert evict(tree) == {"abcdef"}
    assert tree.num_unused == [0]
    with pytest.raises(AssertionError):
        tree.evict(0)
    runs.end()
    assert evict(tree) == {"abcdXY"}


def test_an_entry_too_old_is_put_right_when_it_comes_up() -> None:
    tree = make(0)
    for text in ("ab", "cd", "ef"):
        cache(tree, text)
    for _ in range(3):
        cache(tree, "ab")
    runs = Request(tree, "cd")
    assert evict(tree) == {"ef"}
    assert evict(tree) == {"ab"}
    runs.end()
    assert evict(tree) == {"cd"}


def test_queues_do_not_grow_with_use() -> None:
    tree = make(0, 3, num_pages=8)
    for turn in range(500):
        cache(tree, "abcdef")
        if turn % 5 == 0:
            cache(tree, "xy")
            assert {"xy"} in [evict(tree) for _ in range(4)]  # leaf evictions leave entries of group 1 behind
    assert all(len(heap) <= 8 for heap in tree._heaps)


# Sliding windows.


def test_a_hole_behind_the_window_does_not_matter() -> None:
    """With a window of 3, the query at position 6 sees 4 .. 6: of "abcdef" only "ef" is needed."""
    tree = make(0, 3)
    Request(tree, "abcdef", lost=(0, 2)).end()
    assert holes(tree, 1) == {"ab", "abcd"} and tree.num_cached == [3, 1]
    assert found(tree, "abcdefgh") == "abcdef"
    # Position 4 sees 2 .. 4 and would need "cd": back to the root.
    assert found(tree, "abcdXX") == ""
    runs = Request(tree, "abcdefgh")
    assert runs.num_found == 3 and runs.firsts == [0, 2]


def test_back_off_to_the_longest_usable_prefix() -> None:
    """With a window of 4, position 2n sees 2n − 3 .. 2n: the two pages before it."""
    tree = make(0, 4)
    Request(tree, "abcdefghijkl").end()
    for node in tree.nodes():
        if text_of(node) == "abcdefgh":
            tree._drop(node, 1)
    assert found(tree, "abcdefghijkl") == "abcdefghijkl"
    assert found(tree, "abcdefghijXX") == "abcdef"
    assert found(tree, "abcdefghXX") == "abcdef"


@pytest.mark.parametrize("windows", [(0, 1), (1,)])
def test_a_window_of_one_needs_no_page(windows: tuple[int, ...]) -> None:
    tree = make(*windows)
    runs = Request(tree, "abcd", lost=(0, 2)[-len(windows) :])
    assert found(tree, "abcd") == "abcd"
    runs.end()
    assert paths(tree) == ({"ab", "abcd"} if len(windows) == 2 else set())


def test_holes_are_filled() -> None:
    tree = make(0, 4)
    Request(tree, "abcdef", lost=(0, 2)).end()
    assert holes(tree, 1) == {"ab", "abcd"} and found(tree, "abcdef") == ""
    again = Request(tree, "abcdef")
    assert again.num_found == 0 and holes(tree, 1) == set()
    assert tree.num_cached == [3, 3] and tree.num_unused == [3, 1]
    again.end()
    assert found(tree, "abcdef") == "abcdef" and tree.num_cached == tree.num_unused == [3, 3]
    assert [pool.num_free for pool in tree.pools] == [9, 9]


def test_a_sliding_group_lets_go_of_single_pages() -> None:
    tree = make(0, 4)
    runs = Request(tree, "abcdefgh")
    runs.slide(1, 2)
    cache(tree, "xy")
    assert tree.num_unused == [1, 3]
    assert [evict(tree, 1) for _ in range(3)] == [set()] * 3
    assert holes(tree, 1) == {"ab", "abcd", "xy"} and tree.num_cached == [5, 2]
    assert found(tree, "abcdefgh") == "abcdefgh" and found(tree, "abcd") == found(tree, "xy") == ""
    assert evict(tree, 0) == {"xy"}


def test_a_leaf_takes_the_pages_of_all_groups_with_it() -> None:
    tree = make(4, 0, 0)
    cache(tree, "abcd")
    assert evict(tree, 2) == {"abcd"}
    assert tree.num_cached == [1, 1, 1] and [pool.num_free for pool in tree.pools] == [11, 11, 11]


def test_a_leaf_goes_although_a_request_holds_its_sliding_page() -> None:
    """The request filled a hole of a node whose full page is not its own; that one must not be kept for its sake."""
    tree = make(0, 4)
    Request(tree, "ab", lost=(0, 1)).end()
    runs = Request(tree, "ab")
    assert holes(tree, 1) == set() and tree.num_unused == [1, 0]
    assert evict(tree) == {"ab"}
    assert [pool.num_free for pool in tree.pools] == [11, 11]
    runs.end()
    assert [pool.num_free for pool in tree.pools] == [12, 12]


def test_only_sliding_groups_bare_leaves_go_with_their_bare_ancestors() -> None:
    tree = make(3)
    Request(tree, "abcdef", lost=(2,)).end()
    Request(tree, "abXY", lost=(1,)).end()
    assert holes(tree, 0) == {"ab", "abcd"}
    assert evict(tree) == {"abcdef", "abcd"}
    assert evict(tree) == {"abXY", "ab"}
    assert tree.roots == {}


def test_a_bare_leaf_stays_while_a_request_stands_on_it() -> None:
    tree = make(1)
    runs = Request(tree, "abcd", lost=(2,))
    assert paths(tree) == {"ab", "abcd"} and tree.num_cached == [0]
    node = runs.node
    runs.insert("abcdef")
    assert runs.node.parent is node and tree.num_cached == [1]
    runs.slide(0, 3)
    assert evict(tree) == set()
    runs.end()
    assert tree.roots == {}


# Two who computed the same.


def test_the_first_to_insert_wins_and_the_second_keeps_its_own() -> None:
    tree = make(0)
    first = Request(tree, "abcd")
    second = Request(tree, "abcd", reuse=False)
    assert second.node is first.node
    assert not set(first.tables[0]) & set(second.tables[0])
    assert tree.num_cached == [2]
    first.end()
    assert tree.num_unused == [2] and tree.pools[0].num_free == 8
    second.end()
    assert tree.pools[0].num_free == 10


def test_a_request_whose_node_was_evicted_inserts_again() -> None:
    tree = make(0)
    Request(tree, "mn").end()
    cache(tree, "abcd")
    runs = Request(tree, "abcd", reuse=False)
    assert evict(tree) == {"mn"}
    assert evict(tree) == {"abcd"} and not runs.node.alive
    runs.insert("abcdef")
    assert paths(tree) == {"ab", "abcd", "abcdef"}
    assert found(tree, "abcdef") == "abcdef"
    own = [node.pages[0] in runs.tables[0] for node in tree.nodes()]
    assert own == [False, True, True]  # "ab" is still the first one's
    runs.end()
    assert tree.num_cached == tree.num_unused == [3]


def test_copies_above_a_held_node_go_last_and_are_replaced() -> None:
    tree = make(0)
    cache(tree, "abcd")
    runs = Request(tree, "abcd", reuse=False)
    runs.insert("abcdef")
    cache(tree, "uvwx")
    assert tree.num_unused == [4]  # ab and abcd are unused, but the request's abcdef hangs below them
    assert evict(tree) == {"uvwx"}
    assert evict(tree) == {"uv"}
    assert evict(tree) == {"ab", "abcd", "abcdef"}
    assert tree.num_unused == tree.num_cached == [0] and tree.pools[0].num_free == 9
    runs.insert("abcdefgh")
    assert found(tree, "abcdefgh") == "abcdefgh"
    assert [node.pages[0] for node in tree.nodes()] == runs.tables[0]
    runs.end()
    assert tree.num_unused == tree.num_cached == [4] and tree.pools[0].num_free == 8


@pytest.mark.parametrize("damage", ["hole", "unused", "queue", "depth", "owner", "late"])
def test_check_sees_damage(damage: str) -> None:
    tree = make(0, 3)
    cache(tree, "abcd")
    node = tree.nodes()[-1]
    if damage == "hole":
        tree._drop(node, 0)
    elif damage == "unused":
        tree.num_unused[1] += 1
    elif damage == "queue":
        _, _, page = tree._heaps[1].pop()
        tree._queued[1][page] = False
    elif damage == "depth":
        node.depth += 1
    elif damage == "owner":
        tree._owner[0][node.pages[0] or 0] = None
    else:
        node.stamp -= 1
    with pytest.raises(AssertionError):
        tree.check()
