"""The gated activation and the gated sum in Triton against their references: interpreted, on a GPU, ahead of time."""

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import activation as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import dtypes, everywhere


@everywhere
@pytest.mark.parametrize("kind", ops.activation.ACTIVATIONS)
def test_as_the_reference(kind: str, device: str) -> None:
    wide = torch.randn(5, 3000)
    for dtype in dtypes(device):
        for x_T2I in (wide, wide[:2, :1400], wide[:, 10:24], wide[:1, :34], wide[:0]):
            arguments = copy({"x_T2I": x_T2I.to(dtype), "kind": kind}, torch.device(device))
            assert kernel.accepts(**arguments)
            assert faults(ops.gated_activation, kernel.gated_activation, arguments, dtype) == []


def test_what_it_does_not_accept() -> None:
    x_T2I = torch.randn(4, 8)
    assert kernel.accepts(x_T2I, "silu")
    assert not kernel.accepts(x_T2I, "relu")
    assert not kernel.accepts(x_T2I.T, "silu")
    assert not kernel.accepts(x_T2I[None], "silu")
    assert not kernel.accepts(x_T2I.double(), "silu")


@everywhere
def test_a_gated_sum_as_the_reference(device: str) -> None:
    for dtype in dtypes(device):
        for tokens, width in ((5, 3000), (2, 1024), (3, 34), (1, 7), (0, 8)):
            given = {"x_TD": torch.randn(tokens, width), "gated_TD": torch.randn(tokens, width)}
            given["gate_T1"] = 4 * torch.randn(tokens, 1)
            arguments = copy({name: value.to(dtype) for name, value in given.items()}, torch.device(device))
            assert kernel.accepts_sum(**arguments)
            assert faults(ops.add_gated, kernel.add_gated, arguments, dtype) == []


@everywhere
@pytest.mark.parametrize("by", ["reference", "triton"])
def test_a_gated_sum_rounds_gate_and_product(by: str, device: str) -> None:
    """What is taken away is the rounded product of a rounded gate; of an unrounded one a rest would stay."""
    function = ops.add_gated.reference if by == "reference" else kernel.add_gated
    gate_T1 = torch.linspace(-3, 3, 7, device=device)[:, None]
    gated_TD = torch.linspace(-2, 2, 100, device=device).repeat(7, 1)
    for dtype in dtypes(device)[1:]:
        gate, gated = gate_T1.to(dtype), gated_TD.to(dtype)
        exact = 1 / (1 + (-gate.double()).exp())
        product_TD = (exact.to(dtype).double() * gated.double()).to(dtype)
        assert (product_TD.double() - exact * gated.double()).count_nonzero() > 500
        assert function(-product_TD, gated, gate).count_nonzero() == 0


def test_what_a_gated_sum_does_not_accept() -> None:
    x_TD, gate_T1 = torch.randn(8, 8), torch.randn(8, 1)
    assert kernel.accepts_sum(x_TD, x_TD, gate_T1)
    assert not kernel.accepts_sum(x_TD, x_TD[:4], gate_T1)
    assert not kernel.accepts_sum(x_TD, x_TD, gate_T1[:1])
    assert not kernel.accepts_sum(x_TD, x_TD, x_TD[:, :1])
    assert not kernel.accepts_sum(x_TD, x_TD.T, gate_T1)
    assert not kernel.accepts_sum(x_TD, x_TD, gate_T1.half())
    assert not kernel.accepts_sum(x_TD.double(), x_TD.double(), gate_T1.double())


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
def test_a_gated_sum_compiles_ahead_of_time(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: dependent)
    x_TD, gate_T1 = torch.empty(2, 2048, dtype=torch.bfloat16), torch.empty(2, 1, dtype=torch.bfloat16)
    with recorded(kernel, "add_gated_kernel") as launches:
        kernel.add_gated(x_TD, x_TD, gate_T1)
    # Two streams end before it: it begins when both are done. The kernel behind it may begin earlier.
    assert "launch_pdl" not in launches[0].kwargs
    compiled = compile_for(target, launches[0])
    if target == "sm_90":
        assert ahead_of_time.loads(compiled) == {"wide": 2, "narrow": 1}
        assert "fma." not in compiled.asm["ptx"], "the product is rounded before it is added"
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
    if target in ahead_of_time.AMD:
        return
    assert "griddepcontrol.wait" not in compiled.asm["ptx"]
    assert ("griddepcontrol.launch_dependents" in compiled.asm["ptx"]) == dependent


@pytest.mark.slow
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("kind", ops.activation.ACTIVATIONS)
def test_compiles_ahead_of_time(kind: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(ahead_of_time.DEPENDENT_LAUNCH, lambda device: dependent)
    with recorded(kernel, "gated_activation_kernel") as launches:
        kernel.gated_activation(torch.empty(2, 2 * 5632, dtype=torch.bfloat16), kind)
    compiled = compile_for(target, launches[0])
    if target == "sm_90":
        assert ahead_of_time.loads(compiled) == {"wide": 2, "narrow": 0}
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
    if dependent:
        assert ahead_of_time.loads_around_wait(compiled) == (0, 2)
