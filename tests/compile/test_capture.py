"""What is captured when: common sizes stand in for others until those were missed often and nobody waits."""

from anabranch.compile import capture as module
from anabranch.compile.capture import BySize


def test_nothing_is_made_where_it_is_looked_for() -> None:
    made: list[tuple[str, int]] = []

    def make(kind: str, size: int) -> int:
        made.append((kind, size))
        return size

    graphs = BySize([1, 2, 4, 8, 16, 24, 32], make)
    graphs.add("a", 32)
    assert graphs.find("a", 3) is None, "32 rows are too many to stand in for 4"
    assert graphs.find("b", 32) is None, "kinds do not stand in for each other"
    assert graphs.find("a", 33) is None
    assert not graphs.make_missed(), "none was missed often"
    assert [graphs.find("a", 20) for _ in range(module.IDLE_MISSES)] == [32] * module.IDLE_MISSES
    assert made == [("a", 32)]
    assert not graphs.make_missed(waiting=True), "not often enough to wait for it"
    assert graphs.make_missed() and made == [("a", 32), ("a", 24)]
    assert graphs.find("a", 17) == 24
    assert not graphs.make_missed(), "made once"
    for _ in range(module.BUSY_MISSES):
        graphs.find("a", 9)
    assert graphs.make_missed(waiting=True) and made[-1] == ("a", 16)


def test_large_sizes_serve_only_what_all_but_fills_them() -> None:
    graphs = BySize[str, int]([16, 32, 64, 128], lambda kind, size: size, padded=32)
    for size in graphs.sizes:
        graphs.add("a", size)
    assert [graphs.find("a", rows) for rows in (1, 17, 33, 59, 60, 64, 119, 120, 128)] == [
        16, 32, None, None, 64, 64, None, 128, 128,
    ]  # fmt: skip
    assert not graphs.missed, "what is not served is not missed"
    del graphs.made["a", 32]
    assert graphs.find("a", 30) is None, "nor do they stand in for smaller ones"
