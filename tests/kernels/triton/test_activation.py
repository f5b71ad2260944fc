"""The gated activation in Triton against its reference: in the interpreter, on a GPU, ahead of time."""

import pytest
import torch

from anabranch import ops

pytest.importorskip("triton")
from anabranch.conformance.judge import copy, faults
from anabranch.kernels.triton import activation as kernel
from tests.kernels.triton import ahead_of_time
from tests.kernels.triton.ahead_of_time import compile_for, recorded
from tests.kernels.triton.places import INTERPRETED, compiler, dtypes, everywhere, run_interpreted


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


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


@pytest.mark.slow
@compiler
@pytest.mark.parametrize("target", ahead_of_time.TARGETS)
@pytest.mark.parametrize("kind", ops.activation.ACTIVATIONS)
def test_compiles_ahead_of_time(kind: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dependent = target in ahead_of_time.DEPENDENT
    monkeypatch.setattr(kernel, "dependent_launch", lambda device: dependent)
    with recorded(kernel, "gated_activation_kernel") as launches:
        kernel.gated_activation(torch.empty(2, 2 * 5632, dtype=torch.bfloat16), kind)
    compiled = compile_for(target, launches[0])
    if target == "sm_90":
        assert ahead_of_time.loads(compiled) == {"wide": 2, "narrow": 0}
        assert ahead_of_time.resources(compiled)["LOCAL"] == 0
    if dependent:
        assert ahead_of_time.loads_around_wait(compiled) == (0, 2)
