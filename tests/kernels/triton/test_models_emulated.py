"""Whole models by the kernels of an H200, on the CPU: every family against transformers, and quantised ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from triton.runtime.driver import driver

from anabranch import kernels, ops, platforms
from anabranch.engine.single import SingleSequence
from anabranch.kernels.triton import attention, experts, latent_attention
from anabranch.kernels.tuning.experts_tiles import Machine
from anabranch.loader.load import load_model
from anabranch.ops.weight import BY_INPUT
from anabranch.platforms.platform import HostPlatform, Memory
from tests.kernels.emulation.h200 import hopper
from tests.kernels.emulation.machine import emulated
from tests.kernels.triton.ahead_of_time import NoDevice
from tests.models import tiny

__all__ = ["hopper"]
pytestmark = pytest.mark.usefixtures("hopper")
FAMILIES = {case.model_type: case for case in reversed(tiny.CASES)}
SAME_LAYERS = ("gemma4", "qwen3_5", "qwen3_5_moe", "llama")
"""As others: gemma4_text, qwen3_5_text, qwen3_5_moe_text, qwen3."""
FAST = ("qwen3_moe", "deepseek_v2")
PROMPT = 19
"""Tokens: more than a page."""


class EmulatedPlatform(HostPlatform):
    """Its kernels are an H200's."""

    name = "cuda"
    providers = {"triton": "anabranch.kernels.triton", "torch": "anabranch.kernels.torch"}
    graph_mode = "full"

    @classmethod
    def available(cls) -> bool:
        return True

    def describe(self) -> str:
        return "an H200 on a CPU"

    def memory(self) -> Memory:
        return Memory(free=4 << 30, total=4 << 30)

    def has(self, capability: str) -> bool:
        return capability in ("graphs", "streams", "bf16", "sm90")

    def capture(self, function: Any, pool: Any = None) -> Any:
        function()
        return SimpleNamespace(replay=function, reset=lambda: None)


@contextmanager
def emulated_model(folder: Path, **options: Any) -> Iterator[Any]:
    """(the model, the launches of its kernels)"""
    platform = EmulatedPlatform()
    with mock.patch.object(driver, "_active", NoDevice()), emulated() as launches:
        try:
            yield load_model(folder, platform=platform, **options), launches
        finally:
            kernels.bind(platforms.make("cpu"))


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
        if name not in SAME_LAYERS
    ],
)
def test_families(model_type: str, tmp_path: Path) -> None:
    """A prompt and two steps of one token: the logits of transformers, in fp32."""
    case = FAMILIES[model_type]
    folder = tiny.save(case, tmp_path / "model")
    tokens = tiny.prompt(case)[: PROMPT + 2]
    wanted = tiny.Judge(folder, model_type).logits(tokens)
    with emulated_model(folder, dtype="float32") as (model, _):
        sequence = SingleSequence(model, 64)
        found = torch.cat([sequence.forward(some) for some in (tokens[:PROMPT], tokens[PROMPT:-1], tokens[-1:])])
    assert (found - wanted).abs().max() < 1e-4


WIDE = {
    "hidden_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 131,
}  # fmt: skip
QUANTIZED = {
    "none": (3e-2, {"gate_up_hopper", "down_hopper"}),
    "fp8": (8e-2, {"gate_up_hopper_fp8", "down_hopper_fp8", "gate_up_few"}),
    "int4": (3e-2, {"gate_up_hopper_packed", "down_hopper_packed", "gate_up_few"}),
}
"""The largest error, with FP8 also of activations, and kernels of experts that prompts and steps of one token have."""


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_quantized_in_bf16(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that the kernels for Hopper take: as the references of all ops compute with the same weights."""
    case = replace(FAMILIES["qwen3_moe"], settings=FAMILIES["qwen3_moe"].settings | WIDE)
    folder = tiny.save(case, tmp_path / "model")
    machine = Machine(220 << 10, 3, wgmma=True, hopper=True)
    for module in (attention, experts, latent_attention):
        monkeypatch.setattr(module, "machine_of", lambda device: machine)
    monkeypatch.setattr(experts, "table_for", lambda device, shape: None)
    experts.chosen.cache_clear()
    tokens = (tiny.prompt(case) * 2)[:102]
    found = {}
    with emulated_model(folder, dtype="bfloat16", quantization=quantization) as (model, launches):
        if quantization == "int4":  # counted with the weights when pages are planned
            added = [name for name, _ in model.named_parameters() if name.endswith(BY_INPUT)]
            assert len(added) == 2 * WIDE["num_hidden_layers"]
        for provider in ("", "reference"):
            if provider:
                ops.bind(EmulatedPlatform(), provider)
            sequence = SingleSequence(model, 128)
            parts = tokens[:100], tokens[100:101], tokens[101:]
            found[provider] = torch.cat([sequence.forward(part) for part in parts])
    experts.chosen.cache_clear()
    limit, expected = QUANTIZED[quantization]
    names = {launch.kernel for launch in launches}
    assert names >= expected, sorted(names)
    assert (found[""] - found["reference"]).norm() <= limit * found["reference"].norm()
