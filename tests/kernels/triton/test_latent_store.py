"""The norm of latent rows, rope and the write in one Triton kernel: in the interpreter, on a GPU, ahead of time."""

import pytest
import torch

from anabranch import ops
from anabranch.ops import LatentStoreCall

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import latent_store as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere

GEOMETRIES = {"v2-lite": (16, 128), "glm-4.7-flash": (20, 192), "v3": (128, 128)}
"""Heads, and dims of each that do not turn."""


def draw(tokens: int, heads: int, plain: int, dtype: torch.dtype, interleaved: bool = True) -> LatentStoreCall:
    angle, packed = 100 * torch.rand(tokens, 32), torch.randn(tokens, 64 + 512 + 64).to(dtype)
    slot_T = torch.randperm(max(tokens, 64))[:tokens]
    slot_T[slot_T >= 64] = -1
    slot_T[1::5] = -1
    return LatentStoreCall(
        q_THD=torch.randn(tokens, heads, plain + 64).to(dtype),
        row_TC=packed[:, 64:],
        weight_L=torch.rand(512).to(dtype),
        eps=0.1,
        cos_TF=angle.cos(),
        sin_TF=angle.sin(),
        interleaved=interleaved,
        rows_PSC=torch.randn(4, 16, 512 + 64).to(dtype),
        slot_T=slot_T,
    )


def judge(call: LatentStoreCall, device: str) -> None:
    call = LatentStoreCall(**copy(call._asdict(), torch.device(device)))
    assert kernel.accepts(call)
    assert faults(ops.latent_store, kernel.latent_store, {"call": call}, call.q_THD.dtype) == []


@everywhere
def test_samples(device: str) -> None:
    for dtype in dtypes(device):
        for _, arguments in ops.latent_store.samples(dtype, torch.Generator().manual_seed(0)):
            judge(arguments["call"], device)


@everywhere
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometries(geometry: str, device: str) -> None:
    for dtype in (torch.float32,) if device == "cpu" else dtypes(device):
        for tokens in (2,) if device == "cpu" else (1, 3, 64, 300):
            for interleaved in (True, False):
                judge(draw(tokens, *GEOMETRIES[geometry], dtype, interleaved), device)


@everywhere
def test_padding_alone_writes_nothing(device: str) -> None:
    call = LatentStoreCall(**copy(draw(3, 2, 16, torch.float32)._asdict(), torch.device(device)))
    call.slot_T.fill_(-1)
    before = call.rows_PSC.clone()
    kernel.latent_store(call)
    assert torch.equal(call.rows_PSC, before)


def test_what_it_does_not_accept() -> None:
    call = draw(4, 2, 16, torch.float32)
    assert kernel.accepts(call)
    for name, value in (
        ("q_THD", call.q_THD.half()),
        ("q_THD", torch.randn(4, 80, 2).transpose(1, 2)),
        ("cos_TF", call.cos_TF.half()),
        ("rows_PSC", call.rows_PSC.to(torch.float8_e4m3fn)),
    ):
        assert not kernel.accepts(call._replace(**{name: value})), name


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_compiles_ahead_of_time(geometry: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: dependent)
    with recorded(kernel, "latent_store_kernel") as launches:
        kernel.latent_store(draw(2, *GEOMETRIES[geometry], torch.bfloat16))
    compiled = compile_for(target, launches[0])
    if target == "sm_90":
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
        ahead_of_time.loads_around_wait(compiled)
