"""Ascend NPUs through torch_npu, which adds torch.npu. It is imported when it is used, not with this file.

Which devices there are is the runtime's to say: it reads ASCEND_RT_VISIBLE_DEVICES.

Attention here takes its lengths from the host when it is enqueued (kernels/vendor/torch_npu/attention), so no capture
may contain it: steps, decoding too, are captured in pieces between attentions.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch

from anabranch.platforms.accelerator import AcceleratorPlatform

FRACTAL_NZ = 29
"""The number of the layout that the matrix units read: blocks of 16 × 16."""
NZ_BLOCK = 16
RUNTIME_BYTES = 6 << 30
"""What the runtime takes beside torch's memory: operators' code and workspaces, buffers of collectives."""


class NpuPlatform(AcceleratorPlatform):
    name = "npu"
    device_type = "npu"
    graph_class = "NPUGraph"
    collective_backend = "hccl"
    providers = {"torch_npu": "anabranch.kernels.vendor.torch_npu", "torch": "anabranch.kernels.torch"}
    page_size = 128
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
        if importlib.util.find_spec("torch_npu") is None:
            return False
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError):  # installed, but without CANN behind it
            return False
        return bool(torch.get_device_module("npu").is_available())

    def describe(self) -> str:
        properties = self.api.get_device_properties(self.device)
        seen = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        which = "" if seen is None else f", ASCEND_RT_VISIBLE_DEVICES={seen}"
        return f"{properties.name}, {properties.total_memory / 1e9:.0f} GB{which}"

    def has(self, capability: str) -> bool:
        if capability == "bf16":
            return bool(self.api.is_bf16_supported())
        return capability in ("graphs", "streams")

    def lay_out(self, weight: torch.Tensor) -> torch.Tensor:
        """In blocks, which saves the matrix units the rearranging of every product. A stack of matrices is kept the
        other way round, [E, inputs, outputs], as the grouped product takes it; its shape seen from here stays."""
        fits = not any(size % NZ_BLOCK for size in weight.shape[-2:])
        if not fits or weight.dtype not in (torch.float16, torch.bfloat16):
            return weight
        cast = importlib.import_module("torch_npu").npu_format_cast
        if weight.dim() == 2:
            return cast(weight, FRACTAL_NZ)  # type: ignore[no-any-return]
        return cast(weight.transpose(1, 2).contiguous(), FRACTAL_NZ).transpose(1, 2)  # type: ignore[no-any-return]
