"""Dummy weights are what other engines' are: uniform in ±1e-3, every parameter, the same every time."""

import time

import pytest
import torch
from torch import nn

from anabranch.loader.load import fill_randomly


def drawn(dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> list[torch.Tensor]:
    model = nn.ParameterList(torch.full(shape, 9.0, dtype=dtype, device=device) for shape in [(300, 400), (7,)])
    fill_randomly(model.requires_grad_(False), seed)
    return list(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_uniform_in_the_dtype_itself(dtype: torch.dtype) -> None:
    large, small = drawn(dtype)
    values = large.double()
    assert large.dtype == small.dtype == dtype
    most = torch.tensor(1e-3, dtype=dtype)  # in fp16 that is a little more
    assert large.abs().max() <= most and small.abs().max() <= most
    assert values.max() > 0.99e-3 and values.min() < -0.99e-3
    assert abs(values.mean()) < 1e-5 and values.std() == pytest.approx(2e-3 / 12**0.5, rel=0.02)
    quarters = torch.histc(values, 4, -1e-3, 1e-3) / values.numel()
    assert quarters.sub(0.25).abs().max() < 0.01


def test_the_seed_decides() -> None:
    assert all(torch.equal(a, b) for a, b in zip(drawn(torch.bfloat16), drawn(torch.bfloat16), strict=True))
    assert not torch.equal(drawn(torch.bfloat16)[0], drawn(torch.bfloat16, seed=1)[0])


@pytest.mark.gpu
def test_thirty_billion_take_less_than_a_second() -> None:
    """A tenth of them in a tenth of the time; layers of 400 million, as the experts of Qwen3-30B-A3B have them."""
    model = nn.ParameterList(torch.empty(128, 1536, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(8))
    model.requires_grad_(False)
    fill_randomly(model)
    torch.cuda.synchronize()
    began = time.perf_counter()
    fill_randomly(model)
    torch.cuda.synchronize()
    assert time.perf_counter() - began < 0.1
    assert model[7].abs().max() <= 1e-3 and model[7][127].std() > 5e-4
