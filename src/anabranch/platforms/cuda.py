"""NVIDIA GPUs through torch.cuda."""

import os

import torch
import torch.distributed as dist

from anabranch.config import batch_tokens
from anabranch.platforms import symmetric
from anabranch.platforms.accelerator import AcceleratorPlatform
from anabranch.platforms.platform import OneShot


class CudaPlatform(AcceleratorPlatform):
    name = "cuda"
    device_type = "cuda"
    graph_class = "CUDAGraph"
    collective_backend = "nccl"
    graph_mode = "full"
    deterministic = True
    memory_fraction = 0.85
    proven = "kernels, families, drafts, --deterministic, captured steps, throughput, two ranks: H200, Triton 3.6, 3.7"
    unproven = "several GPUs, other GPUs (kernels compile for sm_80 and sm_100), Triton from 3.8 on (kernels compile)"

    @property
    def batch_tokens(self) -> int:  # type: ignore[override]
        return batch_tokens(self.memory().total)

    @property
    def fp8_cache(self) -> bool:  # type: ignore[override]
        return torch.cuda.get_device_capability(self.device) >= (8, 9)

    def rank_environment(self, rank: int) -> dict[str, str]:
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":  # all on one, to test
            return {}
        count = torch.cuda.device_count()
        if rank >= count:
            raise ValueError(f"tensor_parallel_size: rank {rank} needs a GPU of its own, and there are {count}")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return {"CUDA_VISIBLE_DEVICES": visible.split(",")[rank] if visible else str(rank)}

    def make_one_shot(self, group: dist.ProcessGroup, num_bytes: int) -> OneShot | None:
        return symmetric.make(group, num_bytes, self.device)

    @classmethod
    def available(cls) -> bool:
        return torch.version.cuda is not None and torch.cuda.is_available()

    def describe(self) -> str:
        found = torch.cuda.get_device_properties(self.device)
        size = f"{found.multi_processor_count} SMs, {found.total_memory / 1e9:.0f} GB"
        return f"{found.name}, {size}, compute capability {found.major}.{found.minor}"

    def has(self, capability: str) -> bool:
        if capability in ("graphs", "streams"):
            return True
        major, minor = torch.cuda.get_device_capability(self.device)
        return major >= 8 if capability == "bf16" else capability == f"sm{major}{minor}"
