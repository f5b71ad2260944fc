"""The pool against a list of who holds what."""

import random

import pytest

from anabranch.engine.pages import PagePool


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pool = PagePool(3)
    a, b = pool.allocate(2)
    assert {a, b} < {0, 1, 2} and pool.num_free == 1
    pool.share(a)
    pool.release(a)
    assert pool.num_free == 1 and pool.counts[a] == 1
    pool.release(a)
    pool.release(b)
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]
    assert pool.allocate(0) == []
    for page in (1, 2, 0):
        pool.release(page)
    assert pool.allocate(2) == [0, 2]  # what was given back last comes first
    pool.check()


def test_misuse_is_noticed() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    (page,) = pool.allocate(1)
    pool.release(page)
    with pytest.raises(AssertionError, match="free already"):
        pool.release(page)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(page)
    with pytest.raises(ValueError, match="num_pages must be at least 1, not 0"):
        PagePool(0)


@pytest.mark.parametrize("damage", ["lost", "twice", "held and free"])
def test_check_sees_damage(damage: str) -> None:
    pool = PagePool(4)
    page = pool.allocate(2)[0]
    pool.check()
    if damage == "lost":
        pool.counts[page] = 0
    elif damage == "twice":
        pool._free.append(pool._free[0])
    else:
        pool._free.append(page)
    with pytest.raises(AssertionError):
        pool.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_walk(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(20)
    held: list[int] = []  # one item a reference
    for _ in range(5000):
        choice = rng.random()
        if choice < 0.35 and pool.num_free:
            new = pool.allocate(rng.randint(1, min(4, pool.num_free)))
            assert not set(new) & set(held) and len(set(new)) == len(new)
            held += new
        elif choice < 0.5 and held:
            held.append(rng.choice(held))
            pool.share(held[-1])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check()
        assert pool.num_free == 20 - len(set(held))
        assert pool.counts == [held.count(page) for page in range(20)]
