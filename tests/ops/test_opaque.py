"""What a compiler is told of an op is what the op does."""

from typing import Any

import pytest
import torch

from anabranch import kernels, ops
from anabranch.ops import Op
from anabranch.ops.opaque import opaque_op, shown_to_compiler
from anabranch.ops.weight import Weight
from anabranch.platforms.fake import FakePlatform

FAKED = [op for op in ops.OPS.values() if op.fake is not None]


def results(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", FAKED, ids=lambda op: op.name)
def test_a_fake_has_the_shape_of_the_real_thing(op: Op[..., Any], dtype: torch.dtype) -> None:
    kernels.bind(FakePlatform())
    called = opaque_op(op)
    for label, arguments in op.samples(dtype, torch.Generator().manual_seed(0)):
        fakes, reals = results(op.fake(**arguments)), results(op(**arguments))
        for fake, real in zip(fakes, reals, strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype), label
            assert fake.stride() == real.stride() or not real.numel(), label
        for named, real in zip(results(called(**arguments)), reals, strict=True):
            assert torch.equal(named.nan_to_num(), real.nan_to_num()), label


def test_simple_ops_are_looked_into_if_so_wanted() -> None:
    def graph(look_into: bool) -> str:
        seen = []

        def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
            seen.append(str(module.graph))
            return module.forward

        weight_FD = Weight.of(torch.randn(6, 8))

        def function(x_TD: torch.Tensor) -> torch.Tensor:
            return ops.linear(ops.rms_norm(x_TD, None, 1e-6), weight_FD)

        x_TD = torch.randn(4, 8)
        with shown_to_compiler((ops.rms_norm, ops.linear), look_into):
            found = torch.compile(function, backend=backend, fullgraph=True)(x_TD)
        torch.testing.assert_close(found, function(x_TD))
        (text,) = seen
        return text

    kernels.bind(FakePlatform())
    fused, named = graph(True), graph(False)
    assert "anabranch.linear" in fused and "anabranch.rms_norm" not in fused and "rsqrt" in fused
    assert "anabranch.linear" in named and "anabranch.rms_norm" in named and "rsqrt" not in named
    assert ops.rms_norm.traced is None, "and outside, nothing is changed"
