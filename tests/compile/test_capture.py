"""What is captured when: common sizes stand in for others until those are missed often enough."""

from anabranch.compile import capture as module
from anabranch.compile.capture import BySize


def test_a_larger_one_stands_in_until_patience_ends() -> None:
    made: list[tuple[str, int]] = []

    def make(kind: str, size: int) -> int:
        made.append((kind, size))
        return size

    graphs = BySize([1, 2, 4, 8, 16, 24, 32], make)
    graphs.add("a", 32)
    assert [graphs.find("a", 20) for _ in range(module.PATIENCE)] == [32] * module.PATIENCE
    assert graphs.find("a", 20) == 24 and made == [("a", 32), ("a", 24)]
    assert graphs.find("a", 17) == 24, "made once"
    assert graphs.find("a", 3) == 4, "32 rows are too many to stand in for 4"
    assert graphs.find("b", 32) == 32 and made[-1] == ("b", 32), "kinds do not stand in for each other"
    assert graphs.find("a", 33) is None
