"""Intel GPUs through torch.xpu: Triton kernels where they are for `xpu`, torch elsewhere; nothing is captured."""

import torch

from anabranch.platforms.accelerator import AcceleratorPlatform


class XpuPlatform(AcceleratorPlatform):
    name = "xpu"
    device_type = "xpu"
    collective_backend = "xccl"
    memory_fraction = 0.85
    proven = "which kernels are chosen and which shapes come out"
    unproven = "never run on Intel hardware, nor compiled for it"

    @classmethod
    def available(cls) -> bool:
        return hasattr(torch, "xpu") and torch.xpu.is_available()

    def describe(self) -> str:
        properties = torch.xpu.get_device_properties(self.device)
        return f"{properties.name}, {properties.max_compute_units} units, {properties.total_memory / 1e9:.0f} GB"
