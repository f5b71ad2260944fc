"""AMD GPUs through ROCm, whose torch calls itself torch.cuda: the CUDA platform, and what differs."""

from __future__ import annotations

import torch

from anabranch.platforms.cuda import CudaPlatform


class HipPlatform(CudaPlatform):
    name = "hip"
    proven = "every portable Triton kernel compiles for gfx90a, gfx942 and gfx950"
    unproven = "never run on AMD hardware: everything that happens there"

    @classmethod
    def available(cls) -> bool:
        return torch.version.hip is not None and torch.cuda.is_available()

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.device)
        return (
            f"{properties.name} ({self.architecture}), {properties.multi_processor_count} CUs, "
            f"{properties.total_memory / 1e9:.0f} GB"
        )

    @property
    def architecture(self) -> str:
        """As the compiler names it: `gfx942` of `gfx942:sramecc+:xnack-`."""
        name: str = torch.cuda.get_device_properties(self.device).gcnArchName
        return name.partition(":")[0]

    def has(self, capability: str) -> bool:
        """Every chip that torch supports computes in bf16; capabilities named sm.. are NVIDIA's."""
        return capability in ("graphs", "streams", "bf16", self.architecture)
