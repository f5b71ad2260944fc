"""Ascend NPUs through torch_npu, which adds torch.npu. It is imported when it is used, not with this file.

The runtime reads ASCEND_RT_VISIBLE_DEVICES. Attention takes its lengths from the host when it is enqueued
(kernels/vendor/torch_npu/attention), so no capture may contain it: all steps are captured in pieces between attentions.
"""

import importlib
import os

import torch

from anabranch.platforms.accelerator import AcceleratorPlatform

FRACTAL_NZ = 29
"""The number of the layout that the matrix units read: blocks of 16 × 16."""
NZ_BLOCK = 16
RUNTIME_BYTES = 6 << 30
"""What the runtime takes in addition to torch's memory: operators' code and workspaces, buffers of collectives."""


class NpuPlatform(AcceleratorPlatform):
    name = "npu"
    device_type = "npu"
    graph_class = "NPUGraph"
    collective_backend = "hccl"
    providers = {"torch_npu": "anabranch.kernels.vendor.torch_npu", "torch": "anabranch.kernels.torch"}
    page_size = 128
    fp8_cache = False
    graph_mode = "pieces"
    proven = "calls, shapes, stream order and whole tiny models, by torch_npu over a stub runtime"
    unproven = "never run on Ascend hardware: speed, rounding, captured graphs, the FRACTAL_NZ layout, collectives"

    def __init__(self) -> None:
        if not self.available():
            seen = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "not set")
            raise ValueError(
                "platform 'npu': no Ascend device; it needs the package torch-npu, CANN (source its set_env.sh) and a "
                f"device among ASCEND_RT_VISIBLE_DEVICES ({seen})"
            )
        self.api.config.allow_internal_format = True  # else layouts of the chip's own are not kept
        total = self.memory().total
        self.memory_fraction = round(min(0.9, max(0.5, 1 - RUNTIME_BYTES / total)), 2)

    @classmethod
    def available(cls) -> bool:
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError):  # not installed, or without CANN
            return False
        return bool(torch.get_device_module("npu").is_available())

    def describe(self) -> str:
        properties = self.api.get_device_properties(self.device)
        seen = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        which = "" if seen is None else f", ASCEND_RT_VISIBLE_DEVICES={seen}"
        return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB{which}"

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """In blocks, which the matrix units need not rearrange. A stack of matrices is stored transposed, [E, inputs,
        outputs], as the grouped product takes it, and viewed in its old shape."""
        fits = not any(size % NZ_BLOCK for size in weight.shape[-2:])
        if not fits or weight.dtype not in (torch.float16, torch.bfloat16):
            return weight
        cast = importlib.import_module("torch_npu").npu_format_cast
        if weight.dim() == 2:
            return cast(weight, FRACTAL_NZ)
        return cast(weight.transpose(1, 2).contiguous(), FRACTAL_NZ).transpose(1, 2)
