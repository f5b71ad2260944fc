"""Apple silicon through MLX, whose arrays are not torch tensors: its Runner (`anabranch.mlx`) keeps the model in MLX.

MLX runs on Linux too, on the CPU and slower than torch: there it is never detected, only named
(ANABRANCH_PLATFORM=mlx). The packages are imported when they are used, not with this file.
"""

import importlib.util
import platform as host
import re
import subprocess
from typing import Any

import torch

from anabranch.platforms.cpu import CpuPlatform
from anabranch.platforms.platform import HostPlatform, Memory

VM_STAT_AVAILABLE = ("free", "inactive", "speculative", "purgeable")
"""Pages that macOS hands out without swapping."""


class MlxPlatform(HostPlatform):
    """Torch has its part on the host: sampling parameters, logits and the sampler's kernels."""

    name = "mlx"
    runner = "anabranch.mlx.runner:MlxRunner"
    reads_quantized = True
    fp8_cache = False
    verifies_drafts = False
    divides_models = False
    memory_fraction = 0.8
    proven = "tests/mlx, with MLX's CPU backend on Linux"
    unproven = "never run on Apple silicon: speed, Metal's kernels and memory"

    def __init__(self) -> None:
        for package in ("mlx", "mlx-lm"):
            if importlib.util.find_spec(package.replace("-", "_")) is None:
                raise ValueError(f"platform 'mlx' needs the package {package}; pip install 'anabranch[mlx]'")

    @classmethod
    def available(cls) -> bool:
        if host.system() != "Darwin" or importlib.util.find_spec("mlx_lm") is None:
            return False
        import mlx.core as mx

        return bool(mx.metal.is_available())

    def describe(self) -> str:
        name = _device_info().get("device_name", host.machine())
        where = "Metal" if self.has("metal") else "MLX's CPU backend: computes in fp32"
        return f"{name}, {self.memory().total / 1e9:.0f} GB, {where}"

    def memory(self) -> Memory:
        """Of a Mac, what Metal recommends to keep resident: beyond it macOS swaps, then panics. Else the host's."""
        recommended = _device_info().get("max_recommended_working_set_size")
        if recommended is None:
            return CpuPlatform().memory()
        text = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
        return Memory(free=min(int(recommended), available_bytes(text)), total=int(recommended))

    def has(self, capability: str) -> bool:
        return capability in ("bf16", "metal") and "max_recommended_working_set_size" in _device_info()

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """Of plain weights. MLX's CPU backend has no half precision for experts, and is slow in it elsewhere."""
        return wanted if self.has("metal") else torch.float32

    def synchronize(self) -> None:
        import mlx.core as mx

        mx.synchronize()


def available_bytes(vm_stat: str) -> int:
    """Memory that programs can still get, from the output of macOS's vm_stat."""
    page = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = {name: int(count) for name, count in re.findall(r"Pages (\w+):\s+(\d+)\.", vm_stat)}
    if page is None or "free" not in pages:
        raise ValueError(f"vm_stat: unexpected output {vm_stat[:80]!r}")
    return int(page[1]) * sum(pages.get(name, 0) for name in VM_STAT_AVAILABLE)


def _device_info() -> dict[str, Any]:
    import mlx.core as mx

    return dict(mx.device_info())
