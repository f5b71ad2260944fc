"""AMD's and Intel's GPUs without one: what is detected, what differs from CUDA, and which kernels a model would launch.

Intel's are played by tensors without memory (meta): torch without XPU support does not even index tensors of theirs.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anabranch import kernels, ops, platforms
from anabranch.config import EngineConfig
from anabranch.conformance import tiny
from anabranch.engine.kv_tensors import allocate_layer
from anabranch.layers.config import AttentionConfig, LatentConfig
from anabranch.layers.step import Step
from anabranch.loader.load import build
from anabranch.loader.resolve import resolve
from anabranch.models.config import read_config
from anabranch.models.family import known
from anabranch.moe.setup import make_setup
from anabranch.platforms.cuda import CudaPlatform
from anabranch.platforms.hip import HipPlatform
from anabranch.platforms.npu import NpuPlatform
from anabranch.platforms.platform import InlineStream
from anabranch.platforms.xpu import XpuPlatform

detect = platforms.current.__wrapped__
TRITON = {
    "add_gated",
    "add_rms_norm",
    "attention",
    "count_experts",
    "decode_inputs",
    "decode_pages",
    "experts",
    "gated_activation",
    "gated_delta",
    "gated_delta_accept",
    "gated_delta_drafts",
    "latent_attention",
    "latent_store",
    "linear",
    "logprobs",
    "mask_logits",
    "norm_add",
    "penalize",
    "rms_norm",
    "rope_store",
    "route",
    "sample",
    "sum_add_rms_norm",
}


@pytest.fixture(autouse=True)
def not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_PLATFORM", raising=False)
    monkeypatch.delenv("ANABRANCH_KERNELS", raising=False)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops are bound again as they were."""
    for op in ops.OPS.values():
        monkeypatch.setattr(op, "bound", op.bound)
        monkeypatch.setattr(op, "forced", op.forced)


# ---------------------------------------------------------------------------------------------------------------------
# AMD
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mi300(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch built for ROCm, on a machine with an MI300."""
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        multi_processor_count=304,
        total_memory=192 << 30,
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))


def test_rocm_is_detected_as_hip_and_not_as_cuda(mi300: None) -> None:
    platform = detect()
    assert type(platform) is HipPlatform and not CudaPlatform.available()
    assert platform.describe() == "AMD Instinct MI300X (gfx942), 304 CUs, 206 GB"
    assert platform.has("gfx942") and not platform.has("gfx90a") and not platform.has("sm94")
    assert platform.has("bf16") and platform.compute_dtype(torch.bfloat16) == torch.bfloat16
    assert platform.device == torch.device("cuda:0"), "what torch calls the device there"


def test_hip_is_cuda_but_for_what_it_says() -> None:
    assert issubclass(HipPlatform, CudaPlatform)
    for name in ("providers", "graph_mode", "memory_fraction", "collective_backend", "page_size", "capture", "fetch"):
        assert getattr(HipPlatform, name) == getattr(CudaPlatform, name)


def test_cuda_is_not_hip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert type(detect()) is CudaPlatform and not HipPlatform.available()


@pytest.mark.parametrize("platform", [HipPlatform, XpuPlatform])
def test_every_portable_kernel_is_bound(platform: type[platforms.Platform], mi300: None, bound: None) -> None:
    pytest.importorskip("triton")
    kernels.bind(platform())
    first = {name: op.bound[0].provider if op.bound else "reference" for name, op in ops.OPS.items()}
    assert {name for name, provider in first.items() if provider == "triton"} == TRITON
    assert [kernel.provider for kernel in ops.linear.bound] == ["triton"]  # torch's is for NVIDIA's library
    assert [kernel.provider for kernel in ops.attention.bound] == ["triton", "torch"]


# ---------------------------------------------------------------------------------------------------------------------
# Intel
# ---------------------------------------------------------------------------------------------------------------------


class MetaXpu(XpuPlatform):
    """The XPU platform, with tensors that have no memory."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")

    def make_side_stream(self) -> Any:
        return InlineStream()


def test_xpu_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not XpuPlatform.available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert type(detect()) is XpuPlatform


def test_xpu_captures_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    platform = MetaXpu()
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda: False)
    assert platform.collective_backend == "xccl"
    assert platform.compute_dtype(torch.bfloat16) == torch.float16
    assert platform.has("streams") and not platform.has("graphs")
    assert platform.capture(lambda: None) is None and platform.make_graph_pool() is None
    tiny.write("llama", tmp_path)
    found = resolve(EngineConfig(model=""), read_config(tmp_path), platform)
    assert found.graphs == "none"
    with pytest.raises(ValueError, match="platform 'xpu' captures no graphs"):
        resolve(EngineConfig(model="", graphs="full"), read_config(tmp_path), platform)


@pytest.mark.parametrize("family", known())
def test_a_step_on_xpu_is_triton_kernels(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: None
) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    launched: list[str] = []
    monkeypatch.setattr(jit.JITFunction, "run", lambda self, *args, **kwargs: launched.append(self.fn.__name__))
    platform = MetaXpu()
    kernels.bind(platform)
    if ops.rms_norm.bound[0].provider != "triton":
        pytest.skip("Triton cannot be imported here")
    tiny.write(family, tmp_path)
    model = build(read_config(tmp_path), torch.bfloat16, make_setup(platform))

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    groups, layers, num_tokens = model.config.cache_groups, model.config.layers, 40
    has_states = not all(group.policy.per_token for group in groups)
    step = Step(
        token_T=empty(num_tokens),
        position_T=empty(num_tokens),
        query_start_R=empty(2, dtype=torch.int32),
        context_len_R=empty(1, dtype=torch.int32),
        page_tables=tuple(empty(1, 4 if group.policy.per_token else 1, dtype=torch.int32) for group in groups),
        slots=(empty(num_tokens),) * len(groups),
        logit_row=None,
        max_query=num_tokens,
    )
    meta = torch.device("meta")
    hidden_TD = model(step, [allocate_layer(layer.mixer.cache, 16, 16, torch.bfloat16, meta) for layer in layers])
    logits_TV = model.logits(hidden_TD)
    dtype = torch.float32 if model.config.logit_softcap else torch.bfloat16
    assert (hidden_TD.shape, hidden_TD.dtype) == ((num_tokens, 128), torch.bfloat16)
    assert (logits_TV.shape, logits_TV.dtype) == ((num_tokens, tiny.VOCAB_SIZE), dtype)
    num_attentions, num_latent = (
        sum(isinstance(layer.mixer, kind) for layer in layers) for kind in (AttentionConfig, LatentConfig)
    )
    assert launched.count("attend_rows") == launched.count("rope_store_kernel") == num_attentions
    assert launched.count("attend_latent_rows") == launched.count("latent_store_kernel") == num_latent
    assert (num_attentions + num_latent < len(layers)) == has_states == any("chunk" in name for name in launched)
    num_moe = sum(layer.moe is not None for layer in layers)
    assert (num_moe == 0) == (family in ("llama", "qwen3", "qwen3_5", "qwen3_5_text"))
    assert launched.count("route_kernel") == num_moe
    assert ("gate_up_grouped" in launched) == ("down_grouped" in launched) == (num_moe > 0)


# ---------------------------------------------------------------------------------------------------------------------
# Ascend, where there is none; where torch_npu is: tests/platforms/test_npu.py
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(NpuPlatform.available(), reason="there is one")
def test_npu_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2,3")
    with pytest.raises(ValueError, match=r"no Ascend device; it needs the package torch-npu, CANN .*\(2,3\)$"):
        platforms.make("npu")
