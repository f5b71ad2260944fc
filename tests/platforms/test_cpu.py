"""What is the CPU platform's alone."""

from pathlib import Path

import pytest
import torch

from anabranch.platforms import Memory
from anabranch.platforms.cpu import FEW_PRODUCTS, CpuPlatform, cgroup_memory


def test_small_steps_are_left_to_one_thread() -> None:
    platform, before = CpuPlatform(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with platform.step(FEW_PRODUCTS - 1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with platform.step(FEW_PRODUCTS):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


GB = 1 << 30
NO_LIMIT = 1 << 62


def write_group(folder: Path, version: int, limit: str, usage: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    prefix = "" if version == 2 else "total_"
    parts = f"{prefix}inactive_file {cache // 2}\n{prefix}active_file {cache - cache // 2}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{parts}" + ("active_file 7\n" if version == 1 else ""))


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_leaves(tmp_path: Path, version: int) -> None:
    """The tightest of all groups around this process, from its own to the outermost; cached files count as free."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    base = root if version == 2 else root / "memory"
    assert cgroup_memory(root, own) == Memory(free=NO_LIMIT, total=NO_LIMIT)
    own.write_text("0::/a/b\n" if version == 2 else "4:memory:/a/b\n1:cpu:/x\n0::/\n")
    write_group(base / "a", version, str(8 * GB), 3 * GB, GB)
    assert cgroup_memory(root, own) == Memory(free=6 * GB, total=8 * GB)
    write_group(base / "a" / "b", version, str(4 * GB), GB, 0)
    assert cgroup_memory(root, own) == Memory(free=3 * GB, total=4 * GB)
    write_group(base / "a" / "b", version, "max" if version == 2 else str(NO_LIMIT * 2 - 4096), GB, 0)
    assert cgroup_memory(root, own) == Memory(free=6 * GB, total=8 * GB)
    write_group(base, version, str(7 * GB), 7 * GB, 0)  # all that a container sees of its own group
    assert cgroup_memory(root, own) == Memory(free=0, total=7 * GB)


def test_the_container_bounds_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.platforms.cpu.cgroup_memory", lambda: Memory(free=1000, total=5000))
    assert CpuPlatform().memory() == Memory(free=1000, total=5000)


def test_a_container_without_statistics_counts_all_use(tmp_path: Path) -> None:
    write_group(tmp_path, 2, str(8 * GB), 3 * GB, 2 * GB)
    (tmp_path / "memory.stat").unlink()
    assert cgroup_memory(tmp_path, tmp_path / "none") == Memory(free=5 * GB, total=8 * GB)
