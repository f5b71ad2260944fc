"""AMD GPUs through ROCm, whose torch module is torch.cuda: the CUDA platform, and what differs."""

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
        found = torch.cuda.get_device_properties(self.device)
        size = f"{found.multi_processor_count} CUs, {found.total_memory / 1e9:.0f} GB"
        return f"{found.name} ({self.architecture}), {size}"

    @property
    def architecture(self) -> str:
        """As the compiler names it: `gfx942` of `gfx942:sramecc+:xnack-`."""
        return str(torch.cuda.get_device_properties(self.device).gcnArchName).partition(":")[0]

    def has(self, capability: str) -> bool:
        """Every chip that torch supports computes in bf16; capabilities named sm.. are NVIDIA's."""
        return capability in ("graphs", "streams", "bf16", self.architecture)
