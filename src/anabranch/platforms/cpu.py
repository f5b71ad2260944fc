"""The CPU: works everywhere, x86-64 and ARM, Linux and macOS."""

from __future__ import annotations

import functools
import os
import platform as host
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from anabranch.platforms.platform import Memory, Platform

FEW_PRODUCTS = 32_000_000
"""A step of fewer, a millisecond or two, is left to one thread: alone on the machine a second one would make it a tenth
faster, but beside other work threads that wait for each other hundreds of times a step make it ten times slower."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as the kernel names them (`avx512_bf16`, `amx_bf16`, ARM's `bf16`)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return frozenset()
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(value.split())
    return frozenset(flags)


def cgroup_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Memory:
    """What this process's control groups, from its own to the outermost, leave it; both numbers are larger than any
    memory where there is no limit. Files that the kernel caches count as free: it gives them up."""
    lines = own.read_text().splitlines() if own.exists() else []
    paths = {controllers: path.strip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
    free = total = 1 << 62
    for base, path, limit_file, usage_file in (
        (root, paths.get("", ""), "memory.max", "memory.current"),
        (root / "memory", paths.get("memory", ""), "memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
    ):
        for depth in range(len(path.split("/")) + 1):
            folder = base.joinpath(*path.split("/")[:depth])
            limit, usage = _number(folder / limit_file), _number(folder / usage_file)
            if limit is None or usage is None:
                continue
            fields = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines())
            prefix = "total_" if "total_inactive_file" in fields else ""  # version 1: with the groups inside
            cache = sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
            free, total = min(free, max(0, limit - usage + cache)), min(total, limit)
    return Memory(free=free, total=total)


def _number(file: Path) -> int | None:
    """None: there is no such file, or it says "max"."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    """Empty if the file is not there or may not be read, as in some sandboxes."""
    try:
        return file.read_text()
    except OSError:
        return ""


class CpuPlatform(Platform):
    name = "cpu"
    collective_backend = "gloo"
    providers = {"torch": "anabranch.kernels.torch"}
    memory_fraction = 0.5
    proven = "every test runs here, on x86-64 and aarch64 Linux"
    unproven = "macOS"

    @classmethod
    def available(cls) -> bool:
        return True

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def describe(self) -> str:
        bf16 = "bf16 instructions" if self.has("bf16") else "no bf16 instructions: computes in fp32"
        return f"{host.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {bf16}"

    def memory(self) -> Memory:
        group = cgroup_memory()
        total = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), group.total)
        free, meminfo = min(total, group.free), Path("/proc/meminfo")
        if meminfo.exists():
            fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
            free = min(free, int(fields["MemAvailable"].split()[0]) * 1024)
        return Memory(free=free, total=total)

    def has(self, capability: str) -> bool:
        if capability == "bf16":
            return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})
        return capability in cpu_flags()

    @contextmanager
    def step(self, num_products: int) -> Iterator[None]:
        threads = torch.get_num_threads()
        if threads == 1 or num_products >= FEW_PRODUCTS:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """bf16 only where the CPU has instructions for it: elsewhere it is 40-270 times slower than fp32."""
        if wanted == torch.bfloat16 and self.has("bf16"):
            return wanted
        return torch.float64 if wanted == torch.float64 else torch.float32
