"""The CPU: works everywhere, x86-64 and ARM, Linux and macOS."""

import functools
import os
import platform as host
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from anabranch.platforms.platform import HostPlatform, Memory

FEW_PRODUCTS = 32_000_000
"""A step of fewer, a millisecond or two, gets one thread: a second one makes it a tenth faster on an idle machine, but
ten times slower next to other work, because threads wait for each other hundreds of times a step."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel names them (`avx512_bf16`, `amx_bf16`, ARM's `bf16`)."""
    lines = (line.partition(":") for line in _text(Path("/proc/cpuinfo")).splitlines())
    return frozenset(flag for key, _, value in lines if key.strip() in ("flags", "Features") for flag in value.split())


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Memory:
    """What this process's control groups, from its own to the outermost, leave it; both numbers are larger than any
    memory where there is no limit. Files that the kernel caches count as free: it gives them up."""
    lines = _text(own).splitlines()
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    free = total = 1 << 62
    for base, path, limit_file, usage_file in (
        (root, paths.get("", ""), "memory.max", "memory.current"),
        (root / "memory", paths.get("memory", ""), "memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
    ):
        for depth in range(len(path.split("/")) + 1):
            folder = base.joinpath(*path.split("/")[:depth])
            limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
            if not limit.isdigit() or not usage.isdigit():  # no such file, or "max"
                continue
            fields = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
            prefix = "total_" if "total_inactive_file" in fields else ""  # version 1: with the groups inside
            cache = sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            free, total = min(free, max(0, int(limit) - int(usage) + cache)), min(total, int(limit))
    return Memory(free=free, total=total)


def _text(file: Path) -> str:
    """Empty if the file is not there or may not be read, as in some sandboxes."""
    try:
        return file.read_text()
    except OSError:
        return ""


@contextmanager
def threads(number: int) -> Iterator[None]:
    """torch's, on the host."""
    before = torch.get_num_threads()
    if before == number:  # setting it takes longer than many a product
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CpuPlatform(HostPlatform):
    name = "cpu"
    providers = {"c": "anabranch.kernels.c", "torch": "anabranch.kernels.torch"}
    memory_fraction = 0.5
    proven = "every test runs here, on x86-64 and aarch64 Linux"
    unproven = "macOS"

    @classmethod
    def available(cls) -> bool:
        return True

    def describe(self) -> str:
        return f"{host.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads, computes in fp32"

    def memory(self) -> Memory:
        group = cgroup_memory()
        total = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), group.total)
        fields = dict(line.split(":", 1) for line in _text(Path("/proc/meminfo")).splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024 if fields else total
        return Memory(free=min(total, group.free, available), total=total)

    def has(self, capability: str) -> bool:
        names = {"avx512_bf16", "amx_bf16", "bf16"} if capability == "bf16" else {capability}
        return bool(cpu_flags() & names)

    def step(self, num_products: int) -> AbstractContextManager[None]:
        return threads(1) if num_products < FEW_PRODUCTS else nullcontext()

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """fp32, in which kernels in C read matrices of bf16: one stream in bf16 is 4 times slower where the CPU has
        instructions for it, and 40-270 times elsewhere."""
        return wanted if wanted == torch.float64 else torch.float32
